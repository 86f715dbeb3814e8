"""Adapters in host memory, and their way into the slots of the device."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from weakref import WeakValueDictionary

from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.lora.slots import LoRASlots
from quintet.engine.step_hook import Fail, StepHook
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Channel, DeviceLost
from quintet.layers.lora import PackedLoRA
from quintet.lora.request import LoRAReference

PackAdapter = Callable[[LoRAReference], list[PackedLoRA]]  # reads one, and packs it for each rank here
READERS = 2  # threads that read adapters
MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive

logger = logging.getLogger(__name__)


class LoadedLoRA:
    """An adapter that is read and packed for each rank of this process; a need of the requests that name it."""

    def __init__(self, reference: LoRAReference, future: "Future[list[PackedLoRA]]") -> None:
        self.reference, self.future, self.what = reference, future, f"the adapter {reference.name!r}"

    @property
    def digest(self) -> bytes:
        return self.reference.digest

    @property
    def ready(self) -> bool:
        """True if it can be written to the device."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None

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

    def before_launch(self, plan: StepPlan, fail: Fail) -> None:
        """Writes the adapters of the step's requests to their slots, where others stand. Where one cannot be written,
        on any rank, its requests end on all ranks; its slot counts as empty."""
        wanted: dict[int, LoadedLoRA] = {r.lora_slot: r.lora for r in plan.tokens if r.lora is not None}
        for slot, adapter in wanted.items():
            if self._written.get(slot) == adapter.digest:
                continue
            self._written.pop(slot, None)  # an interruption may leave it half written
            if why := first_refusal(self._ranks.channel, self._write(slot, adapter)):
                self._forget(adapter.digest)  # the next request that names it has it read again
                for request in [each for each in plan.tokens if each.lora_slot == slot]:
                    fail(request, f"{adapter.what} cannot be written to the device: {why}")
            else:
                self._written[slot] = adapter.digest

    def _forget(self, digest: bytes) -> None:
        with self._lock:
            self._kept.pop(digest, None)
            self._known.pop(digest, None)

    def _write(self, slot: int, adapter: LoadedLoRA) -> str:
        """Writes an adapter to a slot -> what went wrong; empty if nothing did."""
        try:
            for worker, packed in zip(self._ranks.workers, adapter.future.result(), strict=True):
                assert worker.lora is not None, "adapters are on"
                worker.lora.write(worker.platform, slot - 1, packed)
        except DeviceLost:
            raise
        except Exception as error:  # no memory left, or a fault of the platform's: it costs these requests alone
            logger.exception("%s cannot be written to slot %d", adapter.what, slot)
            return f"{type(error).__name__}: {error}"
        return ""

    def start_over(self) -> None:
        """Forgets what the device holds: it may have slept."""
        self._written.clear()

    def close(self) -> None:
        """Ends the threads."""
        self._readers.shutdown(wait=False, cancel_futures=True)


def first_refusal(channel: Channel | None, why: str) -> str:
    """Returns why a rank cannot go on with an adapter, with its number where ranks are processes; empty if all can.
    Each rank calls it at the same point, with its own reason or nothing."""
    if channel is None:
        return why
    notes = channel.exchange(why.encode()[:MAX_ERROR_BYTES])
    return next((f"rank {rank}: {note.decode(errors='ignore')}" for rank, note in enumerate(notes) if note), "")
