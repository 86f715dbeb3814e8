"""Memory of one engine on a device, by tag, so that it can be put aside (sleep) and brought back (wake)."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from quintet.interface.platform import ASIDE, DROPPED
from quintet.platforms.gpu.runtime import DeviceEvent, Runtime
from quintet.platforms.host import host_memory

logger = logging.getLogger(__name__)

GIB = 2**30
CHUNK = 64 * 2**20  # bytes that go through pinned memory at once; two are on their way


class TaggedMemory:
    """The memory of tensors by tag: weights, cache. It keeps none of it alive.

    Asleep, a tensor is there and has no memory; awake again its memory may have another address, so that what
    keeps addresses (captured graphs) must check `generation`.
    """

    def __init__(self, runtime: Runtime, index: int) -> None:
        self._runtime, self._index = runtime, index
        self._kept: dict[str, list[StorageWeakRef]] = {}  # memory, not tensors: a layer makes a parameter of each
        self._asleep: list[_Asleep] = []
        self._others: list[WeakMethod[Callable[[], int]]] = []
        self.generation = 0

    def track(self, tag: str, tensors: Iterable[Tensor]) -> None:
        """Counts their memory under the tag from now on."""
        self._kept.setdefault(tag, []).extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def call_before_sleep(self, drop: Callable[[], int]) -> None:
        """Calls this method, as long as its object lives, to let go of what holds addresses -> the bytes it took."""
        self._others = [other for other in self._others if other() is not None] + [WeakMethod(drop)]

    def nbytes(self, tag: str) -> int:
        """Returns the bytes of the tag's tensors; memory that two share counts once."""
        return sum(storage.nbytes() for storage, _ in self._alive(tag))

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self, level: int) -> int:
        """Gives memory back to the device -> bytes. What was in the cache is lost; weights too at level DROPPED.

        If it fails in between, wake() brings back what was put aside by then.
        """
        if level not in (ASIDE, DROPPED):
            raise ValueError(f"level of sleep must be {ASIDE} (weights to the host) or {DROPPED} (dropped): {level}")
        if self._asleep:
            raise ValueError("the device is asleep; wake it first")
        if level == ASIDE:
            self._check_host()
        self._runtime.use(self._index)
        freed = sum(drop() for other in self._others if (drop := other()) is not None)
        self.generation += 1
        for tag in self._kept:
            for storage, reference in self._alive(tag):
                kept = tag == "weights" and level == ASIDE
                aside = self._put_aside(_whole(storage)) if kept else None
                self._asleep.append(_Asleep(reference, storage.nbytes(), aside))
                storage.resize_(0)
        self._runtime.release()
        return freed + sum(each.nbytes for each in self._asleep)

    def wake(self) -> None:
        """Memory again: weights that were put aside as they were, else zeros. What was let go of is passed over.

        MemoryError says what is missing, and all sleeps as before.
        """
        self._runtime.use(self._index)
        wanted = [(storage, each) for each in self._asleep if (storage := _storage(each.reference)) is not None]
        need = sum(each.nbytes for storage, each in wanted if storage.nbytes() == 0)  # a wake that failed has some
        free = self._runtime.memory(self._index)[0] + self._runtime.idle(self._index)
        if need > free:
            raise MemoryError(self._no_room(need, free))
        try:
            for storage, each in wanted:
                storage.resize_(each.nbytes)
        except torch.OutOfMemoryError as error:
            for storage, _ in wanted:
                storage.resize_(0)
            self._runtime.release()
            raise MemoryError(f"{self._no_room(need, free)} ({error})") from None
        for storage, each in wanted:
            if each.aside is None:
                _whole(storage).zero_()
            else:
                send(self._runtime, _whole(storage), each.aside)
        self._asleep = []

    def _put_aside(self, x: Tensor) -> Tensor:
        """Bytes of the device in pageable memory, through two pieces of pinned memory: a copy into pageable memory
        goes through the driver's own small ones, and waits for each."""
        runtime, there = self._runtime, torch.empty(x.shape, dtype=x.dtype)
        pieces = [runtime.pinned(min(CHUNK, x.numel())) for _ in range(2)] if x.numel() else []
        coming: list[tuple[slice, Tensor, DeviceEvent]] = []

        def take() -> None:
            own, piece, arrived = coming.pop(0)
            arrived.synchronize()
            there[own] = piece[: own.stop - own.start]

        for turn, first in enumerate(range(0, x.numel(), CHUNK)):
            own = slice(first, min(first + CHUNK, x.numel()))
            if len(coming) == len(pieces):
                take()
            piece, arrived = pieces[turn % 2], runtime.event()
            runtime.copy(piece[: own.stop - own.start], x[own])
            arrived.record(runtime.current())
            coming.append((own, piece, arrived))
        while coming:
            take()
        return there

    def _no_room(self, need: int, free: int) -> str:
        return (
            f"waking needs {need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free on device {self._index}: others took "
            "the memory that sleep released; free it, and wake again"
        )

    def _check_host(self) -> None:
        need, free = self.nbytes("weights"), host_memory().free
        if need > free:
            raise MemoryError(
                f"putting the weights aside needs {need / GIB:.2f} GiB of host memory, {free / GIB:.2f} GiB are free; "
                f"sleep at level {DROPPED}, which reads them again"
            )

    def _alive(self, tag: str) -> list[tuple[UntypedStorage, StorageWeakRef]]:
        """Returns each piece of memory once."""
        there = {}
        for reference in self._kept.get(tag, []):
            storage = _storage(reference)
            if storage is not None:
                there[reference.cdata] = storage, reference
        self._kept[tag] = [reference for _, reference in there.values()]
        return list(there.values())


@dataclass(frozen=True)
class _Asleep:
    """Memory that was given back."""

    reference: StorageWeakRef
    nbytes: int
    aside: Tensor | None


def send(runtime: Runtime, to: Tensor, source: Tensor) -> None:
    """Fills a dense tensor of the device from one of the host's, in the former's type, through two pieces of pinned
    memory; done when it returns."""
    source, to = source.reshape(-1), to.view(-1)
    step = CHUNK // to.dtype.itemsize
    pieces = [runtime.pinned(min(CHUNK, to.nbytes)).view(to.dtype) for _ in range(2)]
    events: list[DeviceEvent | None] = [None, None]
    for turn, first in enumerate(range(0, to.numel(), step)):
        piece, event = pieces[turn % 2], events[turn % 2]
        if event is not None:
            event.synchronize()
        last = min(first + step, to.numel())
        piece[: last - first].copy_(source[first:last])
        runtime.copy(to[first:last], piece[: last - first])
        events[turn % 2] = event = runtime.event()
        event.record(runtime.current())
    for event in events:
        if event is not None:
            event.synchronize()


def _storage(reference: StorageWeakRef) -> UntypedStorage | None:
    found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def _whole(storage: UntypedStorage) -> Tensor:
    """All of it, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
