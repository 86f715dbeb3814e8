"""Adapters without tensors, for engines on the null device: which are read, held and written, and when."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.lora.loaded import PackedAdapter
from quintet.engine.lora.manager import LoRALimits, LoRAManager, LoRARole
from quintet.engine.request import CoreRequest
from quintet.interface.platform import Channel, DeviceLost
from quintet.lora.request import LoRAReference
from tests.engine.test_overlap import Ask, Served, plain

WAIT = 60  # seconds after which a test has hung


class Tensors:
    """What a real adapter would have in host memory."""

    def __init__(self, name: str) -> None:
        self.name = name


class Shelf:
    """Files of adapters of any name, and a device with slots for them."""

    def __init__(self) -> None:
        self.read: list[str] = []  # in order
        self.held: weakref.WeakSet[Tensors] = weakref.WeakSet()
        self.slots: dict[int, str] = {}
        self.gates: dict[str, threading.Event] = {}  # an adapter is read when its gate is open
        self.bad: set[str] = set()  # cannot be read
        self.workers: Sequence[Any] = [self]
        self.lora, self.platform = self, None
        self.channel: Channel | None = None
        self.started = threading.Semaphore(0)  # released when an adapter begins to be read

    def pack(self, reference: LoRAReference) -> PackedAdapter:
        self.read.append(reference.name)
        self.started.release()
        if reference.name in self.gates:
            assert self.gates[reference.name].wait(WAIT)
        if reference.name in self.bad:
            raise ValueError(f"no file of {reference.name}")
        tensors = Tensors(reference.name)
        self.held.add(tensors)
        return PackedAdapter([tensors])  # type: ignore[list-item]

    def write(self, platform: None, slot: int, tensors: Tensors) -> None:
        self.slots[slot] = tensors.name

    @property
    def names(self) -> set[str]:
        """Adapters in host memory."""
        return {each.name for each in list(self.held)}


def named(name: str) -> LoRAReference:
    return LoRAReference(name, f"/{name}", name.encode())


def asked(request_id: str, adapter: str | None, priority: int = 0, tokens: int = 4) -> CoreRequest:
    """A request with an adapter."""
    prompt = [3 + number % 20 for number in range(5)]
    core = Ask(request_id, prompt, plain(tokens, ignore_eos=True), priority=priority).admitted()
    return core if adapter is None else replace(core, lora=named(adapter), salt=adapter.encode())


def engine_of(
    shelf: Shelf,
    max_loras: int,
    max_cpu_loras: int,
    role: LoRARole = LoRARole.ALONE,
    kind: Callable[[EngineParts], Engine] = Engine,
    **settings: Any,
) -> Served:
    """An engine of that kind with the shelf's adapters."""
    limits = LoRALimits(max_loras, max_cpu_loras)
    made = {"make_lora": lambda *_: LoRAManager(shelf, limits, shelf.pack, role)}  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quintet.engine.parallel.setup.make_engine", lambda parts, ranks: kind(parts))
        return Served(overlap=False, replaced=made, **settings)


class Desk:
    """Where two ranks, which are threads, leave their notes."""

    def __init__(self) -> None:
        self.notes = [b"", b""]
        self.barrier = threading.Barrier(2, timeout=WAIT)
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.why = ""


class ThreadChannel(Channel):
    """The channel of one of them."""

    def __init__(self, desk: Desk, rank: int) -> None:
        self._desk, self._rank = desk, rank

    def broadcast(self, message: bytes) -> None:
        self._desk.messages.put(message)

    def receive(self) -> bytes:
        message = self._desk.messages.get(timeout=WAIT)
        if message is None:
            raise DeviceLost(self._desk.why)
        return message

    def exchange(self, message: bytes) -> list[bytes]:
        assert len(message) <= 1000
        try:
            self._desk.notes[self._rank] = message
            self._desk.barrier.wait()
            notes = list(self._desk.notes)
            self._desk.barrier.wait()
        except threading.BrokenBarrierError:
            raise DeviceLost(self._desk.why or "the other rank did not come") from None
        return notes

    def abort(self, reason: str) -> None:
        self._desk.why = self._desk.why or reason
        self._desk.barrier.abort()
        self._desk.messages.put(None)

    @property
    def aborted(self) -> str:
        return self._desk.why
