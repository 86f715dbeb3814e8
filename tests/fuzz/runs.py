"""Reads spoilt files one after the other, bounded in time and memory: each is refused in one line, or read."""

import random
import resource
import signal
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.targets import Target, allowed

SECONDS = 10.0  # of a processor, for one file: the first of a run imports all that there is
ROOM = 2**30  # bytes of addresses that a process may take beyond what it has when it begins
FLOOR, FACTOR = 2**18, 24  # memory that a header may take: so many bytes, and so many for each of the file's


class TooLong(BaseException):
    """Is no Exception, so that no reader takes it for damage."""


@contextmanager
def bounded(room: int | None = None) -> Iterator[None]:
    """Of each file: how long it takes. Of this process, for good: how much it may take beyond what it has."""
    if room is not None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + room, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"over {SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, ring)
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(target: Target, seeds: range, whole: int = 1) -> Counter[str]:
    """How many were read and how many refused; AssertionError names the seed of what ended otherwise.

    Of one in so many, more than the header is read.
    """
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=_fast()) as name:
        for seed in seeds:
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                found[_one(target, seed, Path(name), seed % whole == 0)] += 1
            except (Exception, TooLong) as error:
                said = f"{type(error).__name__}: {str(error)[:300]}"
                raise AssertionError(f"seed {seed}: {said}") from error
    return found


def _one(target: Target, seed: int, folder: Path, whole: bool) -> str:
    path = target.make(random.Random(seed), folder)
    refused = _measure(target, path)
    if whole:
        refused = allowed(lambda: target.read(path))
    return "refused" if refused else "read"


def _measure(target: Target, path: Path) -> str | None:
    size = sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else [path]))
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    refused = allowed(lambda: target.header(path))
    taken = tracemalloc.get_traced_memory()[1] - before
    assert taken <= FLOOR + FACTOR * size, f"the header of a file of {size} bytes took {taken}"
    return refused


def _fast() -> str | None:
    return "/dev/shm" if sys.platform == "linux" and Path("/dev/shm").is_dir() else None
