"""Feeds spoilt files to the readers: python -m tests.fuzz [--inputs 100000] [--first SEED] [gguf] [safetensors] [torch]

Batches run in processes of their own, so that a crash is told from an error; a failure names the seed that repeats it:
python -m tests.fuzz gguf --first SEED --inputs 1
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.fuzz.runs import ROOM, bounded, run
from tests.fuzz.targets import TARGETS

BATCH = 5000
MINUTES = 20  # for a batch, which takes one


def main() -> int:
    given = arguments()
    return sum(map(_here if given.here else _batches, given.targets, *_spread(given)))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=[], choices=[[], *TARGETS], metavar="TARGET")
    parser.add_argument("--inputs", type=int, default=100_000, help="files for each reader (default: 100000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: 0)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.targets = given.targets or list(TARGETS)
    return given


def _spread(given: argparse.Namespace) -> tuple[list[int], list[int]]:
    return [given.first] * len(given.targets), [given.inputs] * len(given.targets)


def _here(name: str, first: int, inputs: int) -> int:
    target = TARGETS[name]()
    with tempfile.TemporaryDirectory() as kept, bounded(ROOM):
        os.environ["XDG_CACHE_HOME"] = kept
        found = run(target, range(first, first + inputs))
    print(" ".join(f"{count} {what}" for what, count in sorted(found.items())), flush=True)
    return 0


def _batches(name: str, first: int, inputs: int) -> int:
    failed, began = 0, time.monotonic()
    for start in range(first, first + inputs, BATCH):
        count = min(BATCH, first + inputs - start)
        command = [sys.executable, "-m", "tests.fuzz", name, "--here", "--first", str(start), "--inputs", str(count)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60, check=False)
        said = (ended.stdout.strip() or ended.stderr.strip()).splitlines()[-1:]
        failed += ended.returncode != 0
        seconds = time.monotonic() - began
        what = said[0] if said else f"ended with {ended.returncode}"
        print(f"{name} {start}..{start + count - 1}: {what} ({seconds:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
