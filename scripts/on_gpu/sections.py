"""A share of the conformance kit's trials, each written down when it is done; and one report of all shares.

python scripts/on_gpu/sections.py --results FILE --section attention [--share 0/4] [--device cuda]
python scripts/on_gpu/sections.py --results FILE --join REPORT [--device cuda]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tools"))

import msgspec  # the path is set first, so that the script runs by itself

from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject
from quintet.conformance.report import ConformanceReport, TrialOutcome, TrialResult
from scripts.on_gpu.jobs import note, read


def run(device: str, section: str, share: tuple[int, int], results: Path) -> int:
    """Every share[1]-th trial, from the share[0]-th on -> exit code."""
    subject, failed = Subject(device), 0
    number = -1
    for check in kit.checks([section]):
        for trial in kit.list_trials(check, subject):
            number += 1
            if number % share[1] != share[0]:
                continue
            print(f"{number} {check.clause}, {trial.what}", flush=True)
            result = kit.run_trial(check, trial)
            failed += result.outcome is TrialOutcome.FAILED
            if result.outcome is TrialOutcome.FAILED:
                print(result, flush=True)
            note(results, kind="trial", number=number, share=share, result=msgspec.to_builtins(result))
    note(results, kind="section", section=section, share=share, trials=number + 1)
    return int(failed > 0)


def join(device: str, results: Path, report: Path) -> int:
    """Writes the report of the sections whose shares are all there -> 0 if these are all sections, and passed."""
    lines = read(results)
    ended = {(line["section"], *line["share"]) for line in lines if line["kind"] == "section"}
    whole = [each for each in kit.section_names() if complete(ended, each)]
    trials = [line for line in lines if line["kind"] == "trial"]
    found = [(kit.section_names().index(line["result"]["section"]), line["number"], line["result"]) for line in trials]
    kept = [_result(result) for _, _, result in sorted(found, key=lambda each: each[:2]) if result["section"] in whole]
    lacking = [each for each in kit.section_names() if each not in whole]
    made = ConformanceReport.of(Subject(device), whole, kept)
    made.write(report)
    print(made)
    print(f"not whole: {', '.join(lacking) or 'none'}; their trials are in {results}")
    return int(bool(lacking) or not made.passed)


def complete(ended: set[tuple[Any, ...]], section: str) -> bool:
    """Whether every share of a section came to its end."""
    shares = [(share, count) for name, share, count in ended if name == section]
    return bool(shares) and all((share, shares[0][1]) in shares for share in range(shares[0][1]))


def _result(line: dict[str, Any]) -> TrialResult:
    return msgspec.convert(line, TrialResult)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--section", choices=kit.section_names())
    what.add_argument("--join", type=Path, metavar="REPORT")
    parser.add_argument("--share", default="0/1", help="every N-th trial: FIRST/N")
    args = parser.parse_args()
    if args.join:
        return join(args.device, args.results, args.join)
    first, _, count = args.share.partition("/")
    return run(args.device, args.section, (int(first), int(count)), args.results)


if __name__ == "__main__":
    sys.exit(main())
