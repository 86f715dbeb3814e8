"""Adapters in host memory, and their way into the slots of the device."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from weakref import WeakValueDictionary

from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.lora.slots import LoRASlots
from quintet.engine.pooling.adapted_heads import Heads
from quintet.engine.step_hook import StepHook
from quintet.engine.step_plan import StepPlan
from quintet.layers.lora import PackedLoRA
from quintet.lora.request import LoRAReference

READERS = 2  # threads that read adapters


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in host memory."""

    ranks: Sequence[PackedLoRA]  # for each rank of this process
    heads: Heads | None = None  # pooling heads in place of the model's


PackAdapter = Callable[[LoRAReference], PackedAdapter]


class LoadedLoRA:
    """An adapter that is read and packed for each rank of this process; a need of the requests that name it."""

    def __init__(self, reference: LoRAReference, future: "Future[PackedAdapter]") -> None:
        self.reference, self.future, self.what = reference, future, f"the adapter {reference.name!r}"

    @property
    def digest(self) -> bytes:
        return self.reference.digest

    @property
    def ready(self) -> bool:
        """True if it can be written to the device."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

    @property
    def packed(self) -> PackedAdapter:
        """The adapter, once it is ready."""
        return self.future.result()

    def refused(self) -> str:
        """Returns why it cannot be served; empty if it can, or still may be."""
        if self.future.cancelled():
            return "the engine was closed"
        error = self.future.exception() if self.future.done() else None
        return "" if error is None else str(error) or type(error).__name__

    def wait(self) -> str:
        """Waits until it is ready or refused, and returns refused()."""
        wait_for([self.future])
        return self.refused()


@dataclass(frozen=True)
class LoRALimits:
    """Adapters at once."""

    max_loras: int  # on the device
    max_cpu_loras: int  # in host memory while no request has them


class LoRAManager(StepHook):
    """Reads adapters when requests name them, keeps the latest, and writes those of a step's requests to the device
    before it is started."""

    def __init__(self, ranks: WorkerGroup, limits: LoRALimits, pack: PackAdapter) -> None:
        self.slots = LoRASlots(limits.max_loras)
        self._ranks, self._limits, self._pack = ranks, limits, pack
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="adapter")
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, LoadedLoRA] = OrderedDict()
        self._known: WeakValueDictionary[bytes, LoadedLoRA] = WeakValueDictionary()  # those of requests, too
        self._pinned: set[bytes] = set()
        self._written: dict[int, bytes] = {}  # what each slot of the device holds

    def load(self, reference: LoRAReference) -> LoadedLoRA:
        """Returns the adapter with this content, on its way if it is not there."""
        with self._lock:
            found = self._known.get(reference.digest)
            if found is None or found.refused():
                found = LoadedLoRA(reference, self._readers.submit(self._pack, reference))
                self._known[reference.digest] = found
            self._kept[reference.digest] = found
            self._kept.move_to_end(reference.digest)
            droppable = [digest for digest in self._kept if digest not in self._pinned and digest != reference.digest]
            while len(self._kept) > self._limits.max_cpu_loras and droppable:
                del self._kept[droppable.pop(0)]
            return found

    def remove(self, digest: bytes) -> bool:
        """Lets go of an adapter; requests that have it keep it until they end -> whether it was there."""
        with self._lock:
            self._pinned.discard(digest)
            self.slots.unpin(digest)
            return self._kept.pop(digest, None) is not None

    def pin(self, digest: bytes) -> None:
        """Keeps an adapter in host memory, and its slot once it has one. ValueError if it is not there."""
        with self._lock:
            if digest not in self._kept:
                raise ValueError("the adapter is not loaded; call add_lora() first")
            self.slots.pin(digest)
            self._pinned.add(digest)

    @property
    def loaded(self) -> list[LoRAReference]:
        """Adapters in host memory that are ready."""
        with self._lock:
            return [each.reference for each in self._kept.values() if each.ready]

    def before_launch(self, plan: StepPlan) -> None:
        """Writes the adapters of the step's requests to their slots, where others stand."""
        wanted: dict[int, LoadedLoRA] = {r.lora_slot: r.lora for r in plan.tokens if r.lora is not None}
        for slot, adapter in wanted.items():
            if self._written.get(slot) == adapter.digest:
                continue
            self._written.pop(slot, None)  # an interruption may leave it half written
            for worker, mine in zip(self._ranks.workers, adapter.packed.ranks, strict=True):
                assert worker.lora is not None, "adapters are on"
                worker.lora.write(worker.platform, slot - 1, mine)
            self._written[slot] = adapter.digest

    def start_over(self) -> None:
        """Forgets what the device holds: it may have slept."""
        self._written.clear()

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)
