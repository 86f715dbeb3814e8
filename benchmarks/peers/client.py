"""The measuring side of a worker: starts it, asks it, and counts the processor time that it takes."""

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.protocol import Job

ROOT = Path(__file__).resolve().parents[2]
SILENCE = 900.0  # seconds without an answer after which a worker is given up


class WorkerError(Exception):
    """A worker that cannot do what it was asked, with its own reason."""


class Worker:
    """A process of `interpreter`, started in `root`, that holds one job's model. What it prints ends up in `log`."""

    def __init__(
        self,
        job: Job,
        interpreter: str,
        log: Path,
        convert: bool = False,
        root: Path = ROOT,
        module: str = "benchmarks.peers.worker",
    ) -> None:
        command = [interpreter, "-m", module, json.dumps(asdict(job))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
        pipe = subprocess.PIPE
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command + ["--convert"] * convert, cwd=root, env=environment, stdin=pipe, stdout=pipe, stderr=errors
            )
        self.facts: dict[str, Any] = {}

    def ready(self) -> "Worker":
        """Itself, once the model is loaded."""
        try:
            self.facts = self._receive()["ready"]
        except WorkerError:
            self.close()
            raise
        return self

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Any]:
        """Returns the times that Watch reports, and the peak memory."""
        return self.ask({"prompts": prompts, "tokens": tokens})

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Sends a command to the worker and returns its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._end()) from None
        return self._receive()

    def cpu_seconds(self) -> float:
        """Processor time of all its threads so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of what a process that is gone did not read
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], SILENCE)[0]:
            self._process.kill()
            raise WorkerError(f"no answer in {SILENCE:.0f} s")
        line = stream.readline()
        if not line:
            raise WorkerError(self._end())
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise WorkerError(message["error"])
        return message

    def _end(self) -> str:
        return f"its process ended with status {self._process.wait()}; its log says why"
