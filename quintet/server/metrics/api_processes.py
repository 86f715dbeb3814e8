"""Other API processes of the same server: exchanges metrics rows and heartbeats with them."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from quintet.common.metric_types import MetricSample
from quintet.engine.processes.messages import encode, push, worker_address
from quintet.server.processes.messages import FromPeer, MetricsRequest, MetricsResponse, WorkerHeartbeat

GATHER_SECONDS = 1.0  # seconds that a scrape waits for other processes
_MAX_UNSENT = 1000  # queued messages for a process that does not read; more are dropped


class _RowsRequest:
    """A request for metrics rows to several processes."""

    def __init__(self, asked: set[int]) -> None:
        self.missing, self.rows = asked, list[MetricSample]()
        self.done = asyncio.Event()

    def add_rows(self, worker: int, rows: list[MetricSample]) -> None:
        if worker in self.missing:
            self.missing.discard(worker)
            self.rows += rows
        if not self.missing:
            self.done.set()


class ApiPeers:
    """The other API processes. For one event loop; the process's one inbox passes messages to take()."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, worker: int) -> None:
        self.rows: Callable[[], list[MetricSample]] = list  # rows of this process
        self._context, self._folder, self._worker = context, folder, worker
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        self._questions: dict[int, _RowsRequest] = {}
        self._numbers = itertools.count(time.time_ns())  # unique: the process that this one replaced used other numbers
        self._quiet: dict[int, float] = {}  # pid -> seconds since its latest heartbeat

    async def gather(self, num_workers: int, patience: float = GATHER_SECONDS) -> tuple[list[MetricSample], int]:
        """Returns the rows of all other processes, and how many did not answer in time."""
        number = next(self._numbers)
        question = self._questions[number] = _RowsRequest(set(range(num_workers)) - {self._worker})
        try:
            for worker in list(question.missing):
                self._send(worker, MetricsRequest(self._worker, number))
            if question.missing:
                await asyncio.wait_for(question.done.wait(), patience)
        except asyncio.TimeoutError:
            pass  # processes that did not answer are counted
        finally:
            del self._questions[number]
        return question.rows, len(question.missing)

    def tick(self, seconds: float) -> None:
        """Sends a heartbeat to process 0, or counts seconds without one there. Call it every `seconds`.

        Counts calls, not clock time: while this process is stopped, heartbeats wait in its inbox.
        """
        self._say_alive()
        for pid in self._quiet:
            self._quiet[pid] += seconds

    def silent_seconds(self, pid: int) -> float:
        """Returns seconds since the latest heartbeat of that process; 0 before the first: imports may be slow."""
        return self._quiet.get(pid, 0.0)

    def remove(self, pid: int) -> None:
        """Removes a process that has ended."""
        self._quiet.pop(pid, None)

    def handle(self, message: FromPeer) -> None:
        """Handles a request for rows, a heartbeat, or an answer; late answers are ignored."""
        if isinstance(message, WorkerHeartbeat):
            self._quiet[message.pid] = 0.0
        elif isinstance(message, MetricsRequest):
            self._say_alive()  # first: a process that answers and then hangs is detected
            self._send(message.worker, MetricsResponse(self._worker, message.number, self.rows()))
        elif message.number in self._questions:
            self._questions[message.number].add_rows(message.worker, message.rows)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close(0)

    def _say_alive(self) -> None:
        if self._worker:
            self._send(0, WorkerHeartbeat(os.getpid()))

    def _send(self, worker: int, message: FromPeer) -> None:
        if worker not in self._outboxes:
            self._outboxes[worker] = push(self._context, worker_address(self._folder, worker), _MAX_UNSENT)
        try:
            self._outboxes[worker].send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # it does not read, so it will not answer
