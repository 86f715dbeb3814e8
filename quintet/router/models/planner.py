"""Memory plan over all models: which model may be loaded now, and which ones are unloaded for it. Plain data."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

FAIR_SECONDS = 5.0  # seconds that a model waits for room until busy models get no new requests because of it


class ModelState(str, Enum):
    """State of a model's engine. Values are those of llama.cpp's router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"
    UNLOADING = "unloading"


class ModelSize(NamedTuple):
    """Bytes that an engine takes."""

    loaded: int
    asleep: int = 0


@dataclass(eq=False)
class ModelSlot:
    """Place of one model in the plan."""

    name: str
    pinned: bool = False
    size: ModelSize | None = None  # None: not estimated yet
    state: ModelState = ModelState.UNLOADED
    in_flight: int = 0  # requests that its engine has
    waiting: int = 0  # requests that wait for it
    last_used: float = 0.0  # seconds of the loop's clock
    loaded_at: float = 0.0
    is_asleep: bool = False  # its engine sleeps, or ends out of its sleep
    held_for: str | None = None  # the model that waits for this one's memory: it gets no new requests until then

    @property
    def planned(self) -> int:
        """Bytes that are its own now. An engine that ends has them until it has ended."""
        if self.size is None or self.state is ModelState.UNLOADED:
            return 0
        asleep = self.is_asleep and self.state in (ModelState.SLEEPING, ModelState.UNLOADING)
        return self.size.asleep if asleep else self.size.loaded

    @property
    def can_be_unloaded(self) -> bool:
        """True if its engine runs and has nothing to do."""
        return self.state in (ModelState.LOADED, ModelState.SLEEPING) and not self.in_flight and not self.pinned


class ModelTooLarge(ValueError):
    """A model that does not fit into the budget, whatever is unloaded."""


class Room(NamedTuple):
    """Answer to whether a model fits now."""

    fits: bool
    unload: tuple[ModelSlot, ...] = ()  # idle models that are unloaded for it
    hold: tuple[ModelSlot, ...] = ()  # busy models that get no new requests until they are unloaded


class MemoryLedger:
    """Memory of all models. Invariant: what is planned is never more than the budget."""

    def __init__(self, budget: int, slots: Sequence[ModelSlot]) -> None:
        self.budget = budget
        self._slots = {each.name: each for each in slots}

    def __iter__(self) -> Iterator[ModelSlot]:
        return iter(self._slots.values())

    def __getitem__(self, name: str) -> ModelSlot:
        return self._slots[name]

    @property
    def planned(self) -> int:
        """Bytes of all engines that run."""
        return sum(each.planned for each in self)

    def room_for(self, slot: ModelSlot, waited: float) -> Room:
        """Decides whether a model may be loaded or woken. `waited`: seconds that its first request has waited.

        ModelTooLarge with the numbers if it never fits.
        """
        assert slot.size is not None
        self._check_ever(slot, slot.size)
        left = self.budget - self.planned - (slot.size.loaded - slot.planned)
        if left >= 0:
            return Room(True)
        left += sum(each.planned for each in self if each.state is ModelState.UNLOADING)
        others = sorted((each for each in self if each is not slot), key=lambda each: each.last_used)
        idle = _enough([each for each in others if each.can_be_unloaded], -left)
        if idle is not None:
            return Room(False, unload=idle)
        if waited < FAIR_SECONDS:
            return Room(False)
        busy = [each for each in others if each.state in (ModelState.LOADED, ModelState.SLEEPING) and not each.pinned]
        held = _enough(sorted(busy, key=lambda each: (bool(each.in_flight), each.loaded_at)), -left)
        return Room(False, hold=held or ())

    def _check_ever(self, slot: ModelSlot, size: ModelSize) -> None:
        kept = [each for each in self if each.pinned and each is not slot and each.planned]
        taken = sum(each.size.loaded for each in kept if each.size is not None)
        if size.loaded + taken > self.budget:
            pinned = f", of which pinned models have {_gib(taken)} ({', '.join(each.name for each in kept)})" * bool(
                taken
            )
            raise ModelTooLarge(
                f"the model {slot.name!r} needs {_gib(size.loaded)}, and the memory budget is {_gib(self.budget)}"
                f"{pinned}; raise --memory-budget, lower the model's max_model_len, or set its `memory`"
            )


def _enough(slots: Collection[ModelSlot], need: int) -> tuple[ModelSlot, ...] | None:
    """Returns the first of them that free so many bytes; () if none is needed, None if all are too few."""
    chosen: list[ModelSlot] = []
    for each in slots:
        if need <= 0:
            break
        if each.planned:
            chosen.append(each)
            need -= each.planned
    return tuple(chosen) if need <= 0 else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
