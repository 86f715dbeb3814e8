"""A GPU of the host's memory: streams that run when somebody waits for them, graphs, and a limit of memory.

What the model computes happens at once, on the default stream. Copies on other streams happen when an event says so:
who forgets to wait reads what was there before. A graph runs again what was run while it was captured.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from quintet.config import EngineConfig
from quintet.interface.platform import Unavailable
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.platform import GPU

GIB = 2**30


class Stream:
    """Work in order, done up to where somebody has waited. What was done is forgotten, with the memory that it read."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None] | None] = []
        self.done = 0

    def wait_event(self, event: "Event") -> None:
        self.work.append(event.synchronize)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            work, self.work[self.done - 1] = self.work[self.done - 1], None
            assert work is not None, "nothing is done twice"
            with torch.inference_mode():  # as a device does: it knows no modes
                work()


class Event:
    """A place in a stream; the default stream, None, is always there already."""

    def __init__(self, runtime: "FakeRuntime") -> None:
        self._runtime, self._stream, self._until = runtime, None, 0

    def record(self, stream: Any) -> None:
        self._stream, self._until = stream, 0 if stream is None else len(stream.work)

    def synchronize(self) -> None:
        self._runtime.forbidden_while_capturing("an event's synchronize()")
        if self._stream is not None:
            self._stream.run(self._until)


class Graph:
    """What was captured, run again by replay()."""

    def __init__(self, runtime: "FakeRuntime", run: Callable[[], None]) -> None:
        self._runtime, self._run = runtime, run

    def replay(self) -> None:
        self._runtime.replays += 1
        self._run()


class Here(threading.local):
    """What each thread has for itself: the ranks of one model share a runtime."""

    stream: Stream | None = None
    capturing = False


class FakeRuntime:
    """See Runtime. `limit` is what each device has; `calls` notes what was asked for."""

    def __init__(self, limit: int = GIB) -> None:
        self.limit, self.calls = limit, list[str]()
        self.captures = self.replays = self.copies = 0
        self.fails: Exception | None = None  # what the next capture raises
        self._here, self._lock = Here(), threading.Lock()
        self._storages: list[StorageWeakRef] = []

    @property
    def capturing(self) -> bool:
        return self._here.capturing

    def forbidden_while_capturing(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def use(self, index: int) -> None:
        self.calls.append(f"use {index}")

    def memory(self, index: int) -> tuple[int, int]:
        return self.limit - self.used(), self.limit

    def used(self) -> int:
        with self._lock:
            self._storages = [each for each in self._storages if not each.expired()]
            alive = (UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._storages)
            return sum(storage.nbytes() for storage in alive if storage is not None)

    def idle(self, index: int) -> int:
        return 0

    def peak(self, index: int) -> int:
        return self.used()

    def release(self, workspaces: bool = False) -> None:
        self.calls.append("release workspaces" if workspaces else "release")

    def empty(self, shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype)
        nbytes = x.untyped_storage().nbytes()
        if nbytes + self.used() > self.limit:
            raise torch.OutOfMemoryError("out of memory")
        with self._lock:
            self._storages.append(StorageWeakRef(x.untyped_storage()))
        return x.view(torch.uint8).fill_(0x7F).view(dtype) if nbytes and x.dim() else x  # nobody may count on zeros

    def pinned(self, nbytes: int) -> Tensor:
        self.forbidden_while_capturing("cudaHostAlloc")
        return torch.full((nbytes,), 0x55, dtype=torch.uint8)

    def stream(self, index: int) -> Stream:
        return Stream()

    def current(self) -> Stream | None:
        return self._here.stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self._here.stream, stream
        try:
            yield
        finally:
            self._here.stream = before

    def event(self) -> Event:
        return Event(self)

    def copy(self, to: Tensor, source: Tensor) -> None:
        self.copies += 1
        if self._here.stream is None:
            to.copy_(source)
        else:
            self._here.stream.work.append(lambda: to.copy_(source))  # type: ignore[arg-type, return-value]

    def hold(self, x: Tensor, stream: Stream) -> None:
        self.calls.append("hold")

    def pool(self) -> Any:
        self.calls.append("pool")
        return object()

    def capture(self, run: Callable[[], None], pool: Any, stream: Stream) -> Graph:
        if self.fails is not None:
            raise self.fails
        self.captures += 1
        self._here.capturing = True
        try:
            run()
        finally:
            self._here.capturing = False
        return Graph(self, run)


class FakeGPU(GPU):
    """The platform on such devices; `make(...)` gives a class of its own to each test."""

    name = "fake"
    op_priority = {}
    _asks = {}  # nothing waits for this device
    _fake: FakeRuntime

    @classmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        dtypes = torch.bfloat16, torch.float16, torch.float32
        return GPUFacts(("Fake", "Fake", "Fake"), dtypes, torch.float8_e4m3fn, GIB, "3 x Fake")

    @classmethod
    def _make_runtime(cls) -> FakeRuntime:
        return cls._fake

    def _group(self, store: Any, rank: int, size: int) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, size)


def fake_platform(limit: int = GIB, **settings: Any) -> FakeGPU:
    """On a fresh device."""
    made = type("Fake", (FakeGPU,), {"_fake": FakeRuntime(limit)})
    config = EngineConfig(**settings)
    return made(config)  # type: ignore[no-any-return]


def runtime(platform: FakeGPU) -> FakeRuntime:
    """What the platform's devices are made of."""
    return platform._fake
