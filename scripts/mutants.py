"""Puts small faults into Python sources, one at a time, and shows which of them the tests do not notice.

python scripts/mutants.py [--faults 60] [--seed 0] [--cap 360] [--json FILE]       over the core of the engine
python scripts/mutants.py quintet/engine/scheduler.py tests/engine/test_scheduler.py [--faults 20]     in one file

A fault is a comparison that is off by one or turned round, a sum for a difference, an "or" for an "and", a number that
is one more, a condition that lost its "not". The file stays as it is: the tests run in an environment whose
interpreters load another source in its place, also those that the tests start. Tests that hang have noticed it.
scripts/mutants_equivalent.txt lists faults that nothing can show, with the reason; they are not counted.
"""

import argparse
import ast
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import import_graph
from scripts.mutation import python_faults, table
from scripts.mutation.trials import CAUGHT, ROOT, SHARE, Bench, Fault, Trials, benches

PATIENCE = 10  # times what the tests take without a fault, and that many seconds more
CORE = {  # row of the table: patterns of files, and what they leave out
    "engine": (("quintet/engine/**/*.py",), ("quintet/engine/kv_cache/", "quintet/engine/sampling/")),
    "kv_cache": (("quintet/engine/kv_cache/**/*.py",), ()),
    "sampling": (("quintet/engine/sampling/**/*.py", "quintet/ops/sampling.py", "quintet/ops/random.py"), ()),
    "layers": (("quintet/layers/**/*.py",), ()),
    "parsers": (("quintet/parsers/**/*.py",), ()),
    "server": (("quintet/server/**/*.py",), ()),
}


def places(package: str, path: str) -> Iterator[Fault]:
    """Every fault that there is room for in a file."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines, module = source.splitlines(), import_graph.dotted(path)
    seen: Counter[tuple[int, str]] = Counter()
    for number, (line, change, _) in enumerate(python_faults.faults(ast.parse(source))):
        text = lines[line - 1].strip()
        seen[line, change] += 1
        if seen[line, change] > 1:
            change += f" #{seen[line, change]}"
        yield Fault(path, line, text, change, package, module, str(ROOT / path), number)


def drawn(wanted: int, seed: int) -> list[Fault]:
    """The same number from each package of the core: every place in a package is as likely as any other."""
    chosen: list[Fault] = []
    for index, (package, (patterns, left_out)) in enumerate(CORE.items()):
        found = sorted(p.relative_to(ROOT).as_posix() for pattern in patterns for p in ROOT.glob(pattern))
        rooms = [fault for path in found if not path.startswith(left_out or ("\0",)) for fault in places(package, path)]
        count = wanted // len(CORE) + (index < wanted % len(CORE))
        chosen += random.Random(f"{seed} {package}").sample(rooms, min(count, len(rooms)))
    return chosen


def over_the_core(wanted: int, seed: int, trials: Trials, json_file: Path | None) -> bool:
    """Tries the drawn faults, two side by side; returns whether all were caught."""
    faults, equivalent = table.split(drawn(wanted, seed))
    done, graph = trials.done(), import_graph.build(ROOT)
    order = [fault for fault in _in_turn(faults) if fault.key not in done]
    with benches(2) as free, ThreadPoolExecutor(2) as pool:
        queue: SimpleQueue[Bench] = SimpleQueue()
        for bench in free:
            queue.put(bench)

        def tried(fault: Fault) -> None:
            bench = queue.get()
            try:
                trials.tried(fault, graph.nearest([fault.module], [fault.path]), bench)
            finally:
                queue.put(bench)

        list(pool.map(tried, order))
    done = trials.done()
    outcomes = [done[fault.key] for fault in faults]
    result = table.summary(outcomes, equivalent, language="Python", seed=seed, cap_s=trials.cap)
    result["failed_without_a_fault"] = sorted(trials.broken)
    table.show(result)
    table.write(result, json_file)
    return bool(result["caught"] == result["faults"])


def _in_turn(faults: Sequence[Fault]) -> list[Fault]:
    """One of each package in turn, so that a run that is broken off has seen all of them."""
    ranks: dict[str, int] = {}
    turns = []
    for fault in faults:
        turns.append((ranks.setdefault(fault.package, 0), fault))
        ranks[fault.package] += 1
    return [fault for _, fault in sorted(turns, key=lambda turn: turn[0])]


def in_file(file: Path, tests: Sequence[str], wanted: int, seed: int) -> bool:
    """Tries faults of one file with the given tests, slow ones too; returns whether all were caught."""
    found = list(places(file.stem, file.relative_to(ROOT).as_posix()))
    chosen = sorted(random.Random(seed).sample(found, min(wanted, len(found))), key=lambda fault: fault.number or 0)
    words, unseen = ["-m", "", *tests], 0
    with benches(1) as (bench,):
        start = time.monotonic()
        if failed := bench.run(words, float("inf"))[1]:
            raise SystemExit(f"{failed[0] or 'pytest'} fails without a fault; mend that first")
        seconds = PATIENCE * (time.monotonic() - start + 1)
        for fault in chosen:
            bench.load(fault)
            start = time.monotonic()
            seen = bool(bench.run(words, seconds)[1]) or time.monotonic() - start >= seconds
            unseen += not seen
            print(f"{CAUGHT if seen else 'NOT SEEN'} {fault.path}:{fault.line}: {fault.change}", flush=True)
    print(f"{len(chosen) - unseen} of {len(chosen)} faults were caught, of {len(found)} that there is room for")
    return not unseen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="the file that gets the faults; none: the core's files")
    parser.add_argument("tests", nargs="*", help="what pytest is given to run")
    parser.add_argument("--faults", type=int, help="how many are drawn (20 of a file, 60 of the core)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--cap", type=float, default=360, help="seconds of tests for each fault of the core (360)")
    parser.add_argument("--json", type=Path, help="file for the table of the core")
    parser.add_argument("--journal", type=Path, help="outcomes are added here at once, and not tried again")
    args = parser.parse_args()
    if args.file is None:
        journal = args.journal or ROOT / "build" / "mutants" / f"python-{args.seed}.jsonl"
        journal.parent.mkdir(parents=True, exist_ok=True)
        if args.journal is None:
            journal.unlink(missing_ok=True)
        sys.exit(not over_the_core(args.faults or 60, args.seed, Trials(journal, args.cap, share=SHARE), args.json))
    file = args.file.resolve()
    if not file.is_file() or not file.is_relative_to(ROOT) or not args.tests:
        parser.error(f"{args.file} is no file of this repository, or no tests are named")
    sys.exit(not in_file(file, args.tests, args.faults or 20, args.seed))


if __name__ == "__main__":
    main()
