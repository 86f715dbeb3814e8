"""Ways of running the same work, a process each: they are started before anything is timed, and work in turn.

While one works the others are stopped: an engine that waits may look for work all the while, and two ranks that share
two cores with it would be slowed down more than one process with two threads.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil


class Way:
    """A process of `module --way=name --folder=folder`, which ends in answering(), and those of its ranks."""

    def __init__(
        self, module: str, name: str, folder: Path, python: str = sys.executable, more: Sequence[str] = ()
    ) -> None:
        words = [python, "-m", module, f"--way={name}", "--folder", str(folder), *more]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "ready\n":
            if not line:
                raise RuntimeError(f"the process of {name!r} has ended before it was ready; what it said is above")
        self._stop(True)

    def numbers(self, work: str) -> list[float]:
        """Returns the numbers that answering() gives for `work`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stop(False)
        self._process.stdin.write(work + "\n")
        self._process.stdin.flush()
        found = [float(each) for each in self._process.stdout.readline().split()]
        self._stop(True)
        return found

    def _stop(self, stop: bool) -> None:
        """Suspends (or resumes) the process and its ranks."""
        first = psutil.Process(self._process.pid)
        for each in [first, *first.children(recursive=True)]:
            each.suspend() if stop else each.resume()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._stop(False)
        self._process.stdin.close()
        self._process.wait(60)


def answering(measured: Callable[[str], list[float]]) -> None:
    """In a way's process, once it is warm: a line names the work, a line answers with its numbers."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(*measured(line.strip()), flush=True)
