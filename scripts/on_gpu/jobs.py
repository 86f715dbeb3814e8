"""Runs commands beside each other, each with a limit; whatever one of them does, the files of all are there.

A part writes two files: PART.log, with every line of every job as it comes, and PART.jsonl, with a line for each
result. Jobs add theirs to the latter by `note`; this module adds how each job ended.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE = 5.0  # seconds that a job has to say where it was, once its time is up
CUT = "cut off"


@dataclass(frozen=True)
class Job:
    """One command, in the repository's root."""

    name: str
    command: tuple[str, ...]
    seconds: float = 500.0  # at most; less where its part has less left
    alone: bool = False  # when all others of the part are through


@dataclass(frozen=True)
class Part:
    """Jobs that belong together, `together` of them at a time."""

    name: str
    about: str
    jobs: Callable[[Any], list[Job]]  # of the run's settings
    together: int = 1
    seconds: float = 520.0  # for all of them: what starts a machine may cut a command off at ten minutes


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    job: str
    how: str  # "passed", "failed (exit 1)", "cut off after 520 s", "not started: ..."
    seconds: float

    @property
    def passed(self) -> bool:
        return self.how == "passed"


def note(results: Path, **values: Any) -> None:
    """Adds a line to a part's results: one write, so that processes may do so at once."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


class Log:
    """PART.log, and the terminal: lines of several jobs."""

    def __init__(self, path: Path) -> None:
        self._file, self._lock = path.open("w", encoding="utf-8", errors="replace"), threading.Lock()

    def __call__(self, job: str, line: str) -> None:
        with self._lock:
            self._file.write(f"[{job}] {line.rstrip()}\n")
            self._file.flush()
            print(f"[{job}] {line.rstrip()}", flush=True)


class Running:
    """Processes that were started and have not ended. A signal that ends this process ends them too."""

    def __init__(self) -> None:
        self._there: set[int] = set()
        self.stopped = False

    @contextlib.contextmanager
    def watched(self) -> Iterator["Running"]:
        """From here on; only a main thread may ask for signals."""
        known = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {each: signal.signal(each, self._stop) for each in known}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def _stop(self, number: int, frame: Any) -> None:
        self.stopped = True
        for process in tuple(self._there):
            _signal(process, signal.SIGKILL)

    def run(self, job: Job, seconds: float, environment: Mapping[str, str], say: Callable[[str], None]) -> str:
        """-> how it ended."""
        try:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=dict(environment), text=True, errors="replace", start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            return f"not started: {error}"
        self._there.add(process.pid)
        late = threading.Event()
        timer = threading.Timer(seconds, _end, (process, late))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                say(line)
            code = process.wait()
        finally:
            timer.cancel()
            _signal(process.pid, signal.SIGKILL)  # what it has left running
            self._there.discard(process.pid)
        if late.is_set():
            return f"{CUT} after {seconds:.0f} s"
        return "passed" if code == 0 else f"failed (exit {code})"


def _end(process: "subprocess.Popen[str]", late: threading.Event) -> None:
    """SIGABRT first: Python's faulthandler then prints the lines that were running."""
    late.set()
    _signal(process.pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def run(part: Part, jobs: Sequence[Job], out: Path, environment: Mapping[str, str]) -> list[Ended]:
    """All jobs of a part, in order; those that run alone at the end."""
    out.mkdir(parents=True, exist_ok=True)
    log, results, until = Log(out / f"{part.name}.log"), results_of(out, part.name), time.monotonic() + part.seconds
    results.write_text("")  # an earlier run's would be taken for this one's
    with Running().watched() as running:

        def one(job: Job) -> Ended:
            start = time.monotonic()
            seconds = min(job.seconds, until - start)
            if running.stopped or seconds <= 0:
                how = "not started: " + ("it was stopped" if running.stopped else f"the {part.seconds:.0f} s are over")
            else:
                log(job.name, "$ " + " ".join(job.command))
                how = running.run(job, seconds, environment, lambda line: log(job.name, line))
            ended = Ended(job.name, how, round(time.monotonic() - start, 1))
            log(job.name, f"-- {how}, {ended.seconds} s")
            note(results, kind="job", part=part.name, job=job.name, how=how, seconds=ended.seconds)
            return ended

        with ThreadPoolExecutor(part.together) as pool:
            ended = list(pool.map(one, [job for job in jobs if not job.alone]))
        ended += [one(job) for job in jobs if job.alone]
    return ended


def results_of(out: Path, part: str) -> Path:
    """The file that a part's jobs add their results to."""
    return out / f"{part}.jsonl"


def read(results: Path) -> list[dict[str, Any]]:
    """Every line; one that was cut in the middle is left out."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [json.loads(line) for line in lines if re.fullmatch(r"\{.*\}", line)]
