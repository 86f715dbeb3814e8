"""A stand-in for a GPU that bites: it does what a device may do and seldom does, where a random number says so.

Always: work of streams that do not wait for each other is done in any order, early or as late as somebody waits for
it; what is captured is not run; and memory that a copy still reads must stay as it is. When it is set(): an allocation
fails, a capture is lost, or a kernel fails in the queue, from where on all that is computed is garbage until the next
wait, which raises.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from tests.platforms.gpu.fake_torch import GIB, Event, FakeGPU, FakeRuntime, Graph, Stream

Kind = Literal["memory", "capture", "kernel"]
FULL = "CUDA out of memory. Tried to allocate 2.00 MiB."
LOST = "CUDA error: operation failed due to a previous error during capture"
FAILED = "CUDA error: unspecified launch failure"


class BitingEvent(Event):
    """Waiting for it tells of a kernel that has failed by then, and looks whether copies' sources have stayed."""

    _runtime: "BitingRuntime"

    def synchronize(self) -> None:
        super().synchronize()
        self._runtime.landed()
        if self._runtime.broken:
            self._runtime.broken = False
            raise RuntimeError(FAILED)


class BitingStream(Stream):
    """On the device, waiting tells nobody of anything."""

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: Event.synchronize(event))


class BitingRuntime(FakeRuntime):
    """See FakeRuntime."""

    def __init__(self, limit: int = GIB, seed: int = 0) -> None:
        super().__init__(limit)
        self.broken = False
        self.bitten: list[Kind] = []
        self._random = Random(seed)
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._left: dict[Kind, int] = {}
        self._reading: list[tuple[Tensor, Tensor]] = []  # what copies on their way read, and what it was
        self._replaying = False

    def set(self, kind: Kind, passes: int) -> None:
        """It happens once, when so many places have gone well where it may."""
        self._left[kind] = passes

    def _bites(self, kind: Kind) -> bool:
        if kind not in self._left:
            return False
        self._left[kind] -= 1
        if self._left[kind] >= 0:
            return False
        del self._left[kind]
        self.bitten.append(kind)
        return True

    def nudge(self) -> None:
        """Some of what waits in a stream may be done by now."""
        for stream in list(self._streams):
            if self._random.random() < 0.2:
                stream.run(self._random.randint(stream.done, len(stream.work)))

    def landed(self) -> None:
        """The host has waited: what was read on the way must be as it was."""
        for source, was in self._reading:
            assert torch.equal(_bytes(source), _bytes(was)), (
                "memory was written before the copy that reads it was waited for"
            )
        self._reading.clear()

    def stream(self, index: int) -> Stream:
        made = BitingStream()
        self._streams.add(made)
        return made

    def event(self) -> Event:
        return BitingEvent(self)

    def empty(self, shape: Any, dtype: torch.dtype, index: int) -> Tensor:
        if not self._replaying and self._bites("memory"):
            raise torch.OutOfMemoryError(FULL)
        self.nudge()
        return super().empty(shape, dtype, index)

    def copy(self, to: Tensor, source: Tensor) -> None:
        self._reading.append((source, source.clone()))
        super().copy(to, source)
        self.nudge()

    def capture(self, run: Callable[[], None], pool: Any, stream: Stream) -> Graph:
        with self._kept():
            graph = super().capture(run, pool, stream)
        if self._bites("capture"):
            raise RuntimeError(LOST)
        return BitingGraph(self, graph)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """All of the device's memory is afterwards as it was before."""
        alive = (UntypedStorage._new_with_weak_ptr(each.cdata) for each in self._storages)
        before = [(storage, storage.clone()) for storage in alive if storage is not None]
        try:
            yield
        finally:
            for storage, was in before:
                storage.copy_(was)

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One op as a device does it."""
        if not self._replaying and self._bites("memory"):
            raise torch.OutOfMemoryError(FULL)
        given = func(*args, **kwargs)
        if not self.capturing and self._bites("kernel"):
            self.broken = True
        if self.broken:
            _spoil(given, args)
        return given

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Every op inside is the device's."""
        with Ops(self):
            yield

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Nothing is allocated meanwhile."""
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False


class BitingGraph(Graph):
    """A captured step; another graph of the fake runs it."""

    def __init__(self, runtime: BitingRuntime, inner: Graph) -> None:
        super().__init__(runtime, inner._run)
        self._biting = runtime

    def replay(self) -> None:
        with self._biting.replaying():
            super().replay()


class Ops(TorchDispatchMode):
    """Shows every op to the runtime."""

    def __init__(self, runtime: BitingRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._runtime.computed(func, args, kwargs or {})


def _spoil(given: Any, args: Any) -> None:
    """What is new in memory, and of floats, is no number."""
    if isinstance(given, (list, tuple)):
        for each in given:
            _spoil(each, args)
    elif isinstance(given, Tensor) and given.is_floating_point() and given.numel():
        known = {x.untyped_storage().data_ptr() for x in _tensors(args)}
        if given.untyped_storage().data_ptr() not in known:
            given.fill_(float("nan"))


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _tensors(each)


def _bytes(x: Tensor) -> Tensor:
    """NaN is like itself."""
    return x.reshape(-1).view(torch.uint8)


class BitingGPU(FakeGPU):
    """The platform on such a device; each test makes a class of its own."""

    _fake: BitingRuntime

    def compile(self, model: Any, buckets: Any) -> Any:
        step = super().compile(model, buckets)

        def computed(state: Any, batch: Any) -> Any:
            with self._fake.computing():
                return step(state, batch)

        return computed
