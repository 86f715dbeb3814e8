"""Ranks of one model as threads of this process, as an engine runs them."""

import queue
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, NotSupported, require
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import Communicator, Device, Platform
from quintet.interface.types import RankInfo
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.ops import bind

T = TypeVar("T")

MAX_RANKS = 4  # ranks that are tried
TIMEOUT = 60.0  # seconds for one piece of work: a first collective may set up a library


class Hung(ContractViolation):
    """Ranks that wait for each other without end."""


class TestRank:
    """One rank's device and communicator, and the thread that everything of it runs on."""

    def __init__(self, team: "RankTeam", rank: int) -> None:
        self.team, self.rank = team, rank
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name=f"rank {rank}").start()

    def open(self) -> None:
        """Opens the device and the communicator; runs on the rank's own thread."""
        torch.set_num_threads(1)  # it counts per thread
        self.device: Device = self.team.platform.open(self.rank)
        self.comm: Communicator = self.team.platform.connect(RankInfo(self.rank, self.team.size, self.team.endpoint))
        self.ops = bind(self.team.platform.op_priority)
        require(
            (self.comm.rank, self.comm.size) == (self.rank, self.team.size),
            f"rank {self.rank} of {self.team.size} got a communicator of rank {self.comm.rank} of {self.comm.size}",
        )

    def up(self, x: Tensor) -> Tensor:
        """A host tensor on this rank's device."""
        if x.dtype in (torch.int32, torch.float32):
            return self.device.to_device([x.numpy().copy()])[0]
        part = CheckpointSlice("x", tuple(x.shape), ((0, x.shape[0]),) * self.team.size)
        return self.team.platform.place(Weight("x", (part,), 0, self.rank, x.dtype, "vector"), {"x": x})["x"]

    def down(self, x: Tensor) -> Tensor:
        return self.device.to_host(x)().clone()

    def submit(self, call: Callable[[], None] | None) -> None:
        """Queues a call for the rank's thread; None ends the thread."""
        self._asked.put(call)

    def _serve(self) -> None:
        while (call := self._asked.get()) is not None:
            call()


class RankTeam:
    """`size` ranks that are connected."""

    def __init__(self, subject: Subject, size: int) -> None:
        self.size, self.endpoint = size, f"inproc://conformance-{uuid.uuid4().hex}"
        self.platform: Platform = subject.make(tensor_parallel_size=size)
        self.ranks = [TestRank(self, rank) for rank in range(size)]
        self.run_on_all(lambda rank: rank.open())

    def run_on_all(self, work: Callable[[TestRank], T]) -> list[T]:
        """The work on every rank at once -> results in rank order. What one of them raises is raised here."""
        done: queue.SimpleQueue[tuple[int, Any, Exception | None]] = queue.SimpleQueue()

        def run(rank: TestRank) -> None:
            try:
                done.put((rank.rank, work(rank), None))
            except Exception as error:  # handed over to the thread that asked
                done.put((rank.rank, None, error))

        for rank in self.ranks:
            rank.submit(partial(run, rank))
        results: dict[int, T] = {}
        while len(results) < self.size:
            try:
                number, result, error = done.get(timeout=TIMEOUT)
            except queue.Empty:
                missing = sorted(set(range(self.size)) - set(results))
                raise Hung(f"after {TIMEOUT:.0f} s ranks {missing} of {self.size} still wait for the others") from None
            if error is not None:
                raise error
            results[number] = result
        return [results[number] for number in range(self.size)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.submit(None)


def sizes_of(subject: Subject) -> list[int]:
    return sorted({size for size in (2, min(subject.facts.devices, MAX_RANKS)) if 1 < size <= subject.facts.devices})


def equal(got: Tensor, want: Tensor, what: str) -> None:
    require(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    if not torch.equal(got, want):
        at = int((got != want).flatten().nonzero()[0])
        raise ContractViolation(f"{what}: element {at} is {got.flatten()[at]}, wanted {want.flatten()[at]}")


def no_ranks(subject: Subject) -> None:
    if subject.facts.spmd:
        raise NotSupported(
            "one worker drives all devices (Capabilities.spmd is True): its compiler adds the collectives, and "
            "communicator.model is the proof"
        )
    raise NotSupported("no ranks to meet: one device here (Capabilities.devices, Platform.connect)")
