"""The other API processes of the same server: asked for their counts, told ours, and known to live."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from quintet.engine.series import Row
from quintet.server.link import wire

PATIENCE = 1.0  # seconds that a scrape waits for the others
_UNSENT = 1000  # messages that may wait for a process that does not read; more are lost


class _Question:
    """Asked of several processes at once."""

    def __init__(self, asked: set[int]) -> None:
        self.missing, self.rows = asked, list[Row]()
        self.done = asyncio.Event()

    def take(self, worker: int, rows: list[Row]) -> None:
        if worker in self.missing:
            self.missing.discard(worker)
            self.rows += rows
        if not self.missing:
            self.done.set()


class Peers:
    """Used in one event loop; messages come in by the process's one inbox, which hands them to take()."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, worker: int) -> None:
        self.rows: Callable[[], list[Row]] = list  # ours
        self._context, self._folder, self._worker = context, folder, worker
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(time.time_ns())  # a process whose place this one took asked for others
        self._quiet: dict[int, float] = {}  # of each that has told it lives, by its pid: seconds since then

    async def gather(self, num_workers: int, patience: float = PATIENCE) -> tuple[list[Row], int]:
        """The rows of all others, and how many of them did not answer in time."""
        number = next(self._numbers)
        question = self._questions[number] = _Question(set(range(num_workers)) - {self._worker})
        try:
            for worker in list(question.missing):
                self._send(worker, wire.AskRows(self._worker, number))
            if question.missing:
                await asyncio.wait_for(question.done.wait(), patience)
        except asyncio.TimeoutError:
            pass  # the silent ones are counted
        finally:
            del self._questions[number]
        return question.rows, len(question.missing)

    def turn(self, seconds: float) -> None:
        """To be called every so many seconds: tells the first that this one lives, or counts how long others do not.

        Turns are counted, not time: while this process stands still, what they tell waits in its inbox.
        """
        self._say_alive()
        for pid in self._quiet:
            self._quiet[pid] += seconds

    def quiet(self, pid: int) -> float:
        """Seconds since the latest sign of life of that process; 0 before the first: importing may take its time."""
        return self._quiet.get(pid, 0.0)

    def forget(self, pid: int) -> None:
        """It has ended."""
        self._quiet.pop(pid, None)

    def take(self, message: wire.FromPeer) -> None:
        """A question, a sign of life, or an answer; one that comes too late is passed over."""
        if isinstance(message, wire.Alive):
            self._quiet[message.pid] = 0.0
        elif isinstance(message, wire.AskRows):
            self._say_alive()  # first: whoever has answered and then falls silent is noticed
            self._send(message.worker, wire.TellRows(self._worker, message.number, self.rows()))
        elif message.number in self._questions:
            self._questions[message.number].take(message.worker, message.rows)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close(0)

    def _say_alive(self) -> None:
        if self._worker:
            self._send(0, wire.Alive(os.getpid()))

    def _send(self, worker: int, message: wire.FromPeer) -> None:
        if worker not in self._outboxes:
            outbox = self._outboxes[worker] = self._context.socket(zmq.PUSH)
            outbox.sndhwm, outbox.linger = _UNSENT, 0
            outbox.connect(wire.worker_address(self._folder, worker))
        try:
            self._outboxes[worker].send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # it does not read: it will not answer either
