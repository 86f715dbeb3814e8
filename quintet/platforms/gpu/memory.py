"""What a device holds for one engine, by tag, so that it can be put aside (sleep) and brought back (wake)."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from quintet.platforms.gpu.runtime import Runtime

logger = logging.getLogger(__name__)

GIB = 2**30
ASIDE = 1  # level of sleep: weights to the host, the cache dropped
DROPPED = 2  # weights too


class Tagged:
    """The memory of tensors by tag: weights, cache. It keeps none of it alive.

    Asleep, a tensor is there and has no memory; awake again its memory may lie elsewhere, so that whoever keeps
    addresses (captured graphs) must ask for `generation`.
    """

    def __init__(self, runtime: Runtime, index: int) -> None:
        self._runtime, self._index = runtime, index
        self._kept: dict[str, list[StorageWeakRef]] = {}  # memory, not tensors: a layer makes a parameter of each
        self._asleep: list[_Asleep] = []
        self.generation = 0

    def keep(self, tag: str, tensors: Iterable[Tensor]) -> None:
        """Counts their memory under the tag from now on."""
        self._kept.setdefault(tag, []).extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def nbytes(self, tag: str) -> int:
        """What the tag's tensors take; memory that two share counts once."""
        return sum(storage.nbytes() for storage, _ in self._alive(tag))

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def sleep(self, level: int) -> int:
        """Gives memory back to the device -> bytes. What was in the cache is lost; weights too at level DROPPED."""
        if level not in (ASIDE, DROPPED):
            raise ValueError(f"level of sleep must be {ASIDE} (weights to the host) or {DROPPED} (dropped): {level}")
        if self._asleep:
            raise ValueError("the device is asleep; wake it first")
        self._runtime.use(self._index)
        for tag in self._kept:
            for storage, reference in self._alive(tag):
                kept = tag == "weights" and level == ASIDE
                aside = _whole(storage).to("cpu", copy=True) if kept else None  # waits for the device
                self._asleep.append(_Asleep(reference, storage.nbytes(), aside))
                storage.resize_(0)
        self._runtime.release()
        self.generation += 1
        freed = sum(each.nbytes for each in self._asleep)
        logger.info("asleep at level %d: %.2f GiB given back", level, freed / GIB)
        return freed

    def wake(self) -> None:
        """Memory again: weights that were put aside as they were, everything else zeros."""
        self._runtime.use(self._index)
        for each in self._asleep:
            storage = _storage(each.reference)
            if storage is None:
                continue
            storage.resize_(each.nbytes)
            if each.aside is None:
                _whole(storage).zero_()
            else:
                _whole(storage).copy_(each.aside)
        self._asleep = []

    def _alive(self, tag: str) -> list[tuple[UntypedStorage, StorageWeakRef]]:
        """Each piece of memory once."""
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


def _storage(reference: StorageWeakRef) -> UntypedStorage | None:
    found: UntypedStorage | None = UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def _whole(storage: UntypedStorage) -> Tensor:
    """All of it, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
