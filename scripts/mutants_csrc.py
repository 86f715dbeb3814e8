"""Puts small faults into the C++ kernels, one at a time, and shows which of them the tests do not notice.

python scripts/mutants_csrc.py [--faults 20] [--seed 0] [--cap 360] [--json FILE]

Each fault is built from a copy of the sources, of which only what changed is compiled; the interpreters of an
environment of its own load the module, also those that tests start. Another fault is drawn in the place of one that
does not compile, that leaves the module as it was to the byte, or that lies in a file that is compiled only for
instruction sets that this processor lacks.
"""

import argparse
import random
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.mutation import csrc_faults, table
from scripts.mutation.csrc_build import ISAS, Builder
from scripts.mutation.trials import ROOT, SHARE, Bench, Fault, Trials, benches

FOLDERS = ("tests/platforms/cpu", "tests/csrc", "tests/ops", "tests/layers")  # nearest first
NEAR = {  # words of a source's path: words of the names of the tests that come first
    "attention": ("attention", "heads"), "moe": ("moe", "ungated"), "sampling": ("sampling", "drafts"),
    "states": ("states",), "quantized": ("quantized", "blocks"), "float8": ("float8",), "linear": ("linear",),
    "comm": ("comm", "networked"), "topology": ("host", "csrc"), "ceiling": ("csrc",), "features": ("csrc", "host"),
    "graph": ("replay", "traced"), "streams": ("streams", "small"), "team": ("csrc", "comm"),
    "norm": ("small",), "rotary": ("small",), "elementwise": ("small",), "sums": ("small", "comm"),
}  # fmt: skip


def tests(path: str) -> list[str]:
    """The tests of the kernels: those whose names have the source's word come first, then by folder."""
    words = [word for key, names in NEAR.items() if key in path for word in names]
    files = [f.relative_to(ROOT).as_posix() for folder in FOLDERS for f in sorted((ROOT / folder).rglob("test_*.py"))]
    return sorted(files, key=lambda file: not any(word in file.rpartition("/")[2] for word in words))


def drawn(seed: int, builder: Builder) -> list[tuple[str, csrc_faults.Place]]:
    """All places of files that this processor can run, in the order of the draw."""
    from quintet import _cpu  # its own judgement of the processor; the tests run each set up to this one

    here = set(ISAS[: ISAS.index(_cpu.isa()) + 1]) if _cpu.isa() in ISAS else {"baseline"}
    sets = builder.instruction_sets()
    rooms = []
    for file in sorted((ROOT / "csrc" / "cpu").rglob("*")):
        path = file.relative_to(ROOT).as_posix()
        if file.suffix in (".cpp", ".h") and sets.get(path, set()) & here:
            rooms += [(path, place) for place in csrc_faults.places(file.read_text(encoding="utf-8"))]
    random.Random(seed).shuffle(rooms)
    return rooms


def run(wanted: int, seed: int, trials: Trials, json_file: Path | None) -> bool:
    """Builds one fault while the tests of two others run; returns whether all were caught."""
    builder = Builder()
    builder.prepare()
    done, chosen, redrawn = trials.done(), [], 0
    with benches(2) as free, ThreadPoolExecutor(2) as pool:
        queue: SimpleQueue[Bench] = SimpleQueue()
        for bench in free:
            queue.put(bench)

        def tried(fault: Fault, bench: Bench) -> None:
            try:
                trials.tried(fault, tests(fault.path), bench)
            finally:
                Path(fault.file).unlink()
                queue.put(bench)

        running: list[Future[None]] = []
        known = table.equivalents()
        for number, (path, place) in enumerate(drawn(seed, builder)):
            if len(chosen) == wanted:
                break
            text = (ROOT / path).read_text(encoding="utf-8").splitlines()[place.line - 1].strip()
            fault = Fault(path, place.line, text, place.change, _package(path), "quintet._cpu", "", None)
            if fault.key in done or (path, text, place.change) in known:
                chosen.append(fault)
                continue
            bench = queue.get()  # builds no further ahead than tests follow
            module = builder.with_fault(path, place, str(number))
            if module is None:
                redrawn += 1
                queue.put(bench)
                continue
            fault = replace(fault, file=str(module))
            chosen.append(fault)
            running.append(pool.submit(tried, fault, bench))
        for future in running:
            future.result()
    return _ended(chosen, trials, json_file, seed=seed, redrawn=redrawn)


def _package(path: str) -> str:
    """Row of the table: attention, sampling, ..., kernels, or cpu for the files beside these folders."""
    return path.split("/")[2] if path.count("/") > 2 else "cpu"


def _ended(chosen: list[Fault], trials: Trials, json_file: Path | None, **facts: int) -> bool:
    done = trials.done()
    outcomes = [done[fault.key] for fault in chosen if fault.key in done]
    equivalent = [fault for fault in chosen if fault.key not in done]
    result = table.summary(outcomes, equivalent, language="C++", cap_s=trials.cap, **facts)
    result["failed_without_a_fault"] = sorted(trials.broken)
    table.show(result)
    table.write(result, json_file)
    return bool(result["caught"] == result["faults"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20, help="how many are drawn (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--cap", type=float, default=360, help="seconds of tests for each fault (360)")
    parser.add_argument("--json", type=Path, help="file for the table")
    parser.add_argument("--journal", type=Path, help="outcomes are added here at once, and not tried again")
    args = parser.parse_args()
    journal = args.journal or ROOT / "build" / "mutants" / f"csrc-{args.seed}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    if args.journal is None:
        journal.unlink(missing_ok=True)
    sys.exit(not run(args.faults, args.seed, Trials(journal, args.cap, share=SHARE), args.json))


if __name__ == "__main__":
    main()
