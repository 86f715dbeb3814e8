"""Adapters in host memory, and their way into the slots of the device."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from weakref import WeakValueDictionary

from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.lora.loaded import LoadedLoRA, PackedAdapter, refusal_of
from quintet.engine.lora.readers import Digests, reading_pool
from quintet.engine.lora.slots import LoRASlots
from quintet.engine.scheduler import Scheduler
from quintet.engine.step_hook import Fail, StepHook
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Channel, DeviceLost
from quintet.lora.request import LoRAReference
from quintet.model_loader.weight_files import WeightFiles

PackAdapter = Callable[[LoRAReference], PackedAdapter]  # reads one, and packs it for each rank here
Packed = Future[PackedAdapter]
READERS = 2  # threads that read adapters
MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoRALimits:
    """Adapters at once."""

    max_loras: int  # on the device
    max_cpu_loras: int  # in host memory, beside those of running requests


class LoRARole(Enum):
    """Choice of the adapters in this process's memory: where it is made."""

    ALONE = "alone"  # by its own queue
    LEADS = "leads"  # by its own queue, and other ranks have the same
    FOLLOWS = "follows"  # as rank 0 orders
    MIRRORS = "mirrors"  # as each rank does alike, by the same calls


@dataclass(frozen=True)
class LoRAOrder:
    """For the other ranks: an adapter gets a place in host memory, or loses it."""

    reference: LoRAReference
    loads: bool


class LoRAManager(StepHook):
    """Reads adapters in the order of the requests that name them, keeps the latest, and writes those of a step's
    requests to the device before it is started.

    In host memory are those of running requests, and max_cpu_loras more. An adapter that is only checked is read beside
    them where all have requests, by READERS threads at most, and not kept.
    """

    def __init__(
        self, ranks: WorkerGroup, limits: LoRALimits, pack: PackAdapter, role: LoRARole = LoRARole.ALONE
    ) -> None:
        self.slots = LoRASlots(limits.max_loras)
        self._ranks, self._limits, self._pack, self._role = ranks, limits, pack, role
        self._readers = reading_pool(READERS, "adapter")
        self.digests = Digests()
        self._lock = threading.RLock()
        self._kept: OrderedDict[bytes, LoadedLoRA] = OrderedDict()  # those with a place in host memory
        self._known: WeakValueDictionary[bytes, LoadedLoRA] = WeakValueDictionary()  # those that wait for one, too
        self._pinned: set[bytes] = set()
        self._removed: dict[bytes, Callable[[], object]] = {}  # to be dropped when no request has them; what follows
        self.orders: list[LoRAOrder] = []  # for other ranks, which take_orders() takes
        self._written: dict[int, bytes] = {}  # what each slot of the device holds
        self.is_short = False  # a request's adapter waits for a place: advance() is to be called

    def load(self, reference: LoRAReference) -> LoadedLoRA:
        """Returns the adapter with this content for a request, which counts as its user until it ends."""
        with self._lock:
            adapter = self.prepare(reference)
            adapter.users += 1
            return adapter

    def prepare(self, reference: LoRAReference) -> LoadedLoRA:
        """Returns the adapter with this content; it is read at once if there is room, or when its turn comes."""
        with self._lock:
            adapter = self._find(reference)
            if adapter.has_place:
                self._kept.move_to_end(adapter.digest)
            elif self._role is LoRARole.FOLLOWS or len(self._kept) < self._limits.max_cpu_loras:
                self._give_place(adapter)
            else:
                self.is_short = True
            return adapter

    def find(self, reference: LoRAReference) -> LoadedLoRA:
        """Returns the adapter with this content, as it is."""
        with self._lock:
            return self._known.get(reference.digest) or self.prepare(reference)

    def _find(self, reference: LoRAReference) -> LoadedLoRA:
        adapter = self._known.get(reference.digest)
        if adapter is None or (adapter.refused() and not adapter.users):
            self.forget(reference.digest)
            adapter = self._known[reference.digest] = LoadedLoRA(reference)
        adapter.reference = reference  # the latest path
        return adapter

    def check(self, reference: LoRAReference) -> str:
        """Reads an adapter ahead of its requests -> why it cannot be served; empty if it can. It stays in host memory,
        in the place of one that has no requests. Any thread may call it."""
        with self._lock:
            adapter = self._find(reference)
            self._removed.pop(adapter.digest, None)
            if adapter.has_place:
                self._kept.move_to_end(adapter.digest)
            elif self._make_room(lambda each: each.users == 0, ()):
                self._give_place(adapter)
            future = adapter.future if adapter.has_place else self._readers.submit(self._logged_pack, reference)
        wait_for([future])
        return refusal_of(future)

    def advance(self, queue: Iterable[LoadedLoRA], fixed: Collection[bytes], running: Collection[bytes]) -> bool:
        """Gives places to adapters in the order of the queue -> whether one has lost its place that has requests.

        `queue`: adapters of requests that wait, in their order; `fixed`: adapters that keep their places, beside those
        of `running` requests, which do not count.
        """
        with self._lock:
            self.is_short = False
            held = self._pinned.union(fixed).difference(running)
            room = self._limits.max_cpu_loras - sum(digest in held for digest in self._kept)
            turns: dict[bytes, LoadedLoRA] = {}
            for adapter in queue:
                known = adapter.digest in turns or adapter.digest in running
                if known or (adapter.has_place and adapter.digest in held):
                    continue
                if len(turns) == room:
                    self.is_short = True
                    break
                turns[adapter.digest] = adapter
            kept = {*turns, *held, *running}
            before = {digest for digest, adapter in self._kept.items() if adapter.users}
            for adapter in turns.values():
                if not adapter.has_place:
                    if not self._make_room(lambda each: each.digest not in kept, running):
                        self.is_short = True  # one that is being read cannot be dropped yet
                        break
                    self._give_place(adapter)
            self._make_room(lambda each: each.digest not in kept, running, spare=0)
            return not before.issubset(self._kept)

    def _make_room(self, may_go: Callable[[LoadedLoRA], bool], running: Collection[bytes], spare: int = 1) -> bool:
        """Drops adapters, those that were not used for longest first, until there is room for one (spare=1) or none
        more (0) -> whether there is."""
        count = sum(digest not in running for digest in self._kept)
        for digest, adapter in list(self._kept.items()):
            if count + spare <= self._limits.max_cpu_loras:
                break
            if digest not in self._pinned and digest not in running and self._is_settled(adapter) and may_go(adapter):
                self._drop(adapter)
                count -= 1
        return count + spare <= self._limits.max_cpu_loras

    def _is_settled(self, adapter: LoadedLoRA) -> bool:
        """True if it is not being read: on any rank, where all choose alike."""
        return adapter.confirmed if self._role is LoRARole.MIRRORS else adapter.future.done()

    def _give_place(self, adapter: LoadedLoRA) -> None:
        adapter.has_place = True
        self._kept[adapter.digest] = adapter
        self._order(adapter, loads=True)
        if not adapter.future.done():
            self._readers.submit(self._read, adapter.reference, adapter.future)

    def _read(self, reference: LoRAReference, future: Packed) -> None:
        """Runs in a thread."""
        with suppress(InvalidStateError):  # the engine was closed
            try:
                future.set_result(self._logged_pack(reference))
            except BaseException as error:
                future.set_exception(error)

    def _logged_pack(self, reference: LoRAReference) -> PackedAdapter:
        try:
            return self._pack(reference)
        except Exception as error:
            logger.warning("adapter %r of %s: %s", reference.name, reference.path, error)
            raise

    def _drop(self, adapter: LoadedLoRA) -> None:
        del self._kept[adapter.digest]
        adapter.lose_place()
        self._order(adapter, loads=False)

    def _order(self, adapter: LoadedLoRA, loads: bool) -> None:
        if self._role is LoRARole.LEADS:
            self.orders.append(LoRAOrder(adapter.reference, loads))

    def take_orders(self) -> list[LoRAOrder]:
        """Returns and clears what other ranks are to do."""
        with self._lock:
            orders, self.orders = self.orders, []
            return orders

    def forget(self, digest: bytes) -> None:
        """Has an adapter read again for its next request: it failed, here or on another rank. Requests that have it
        keep what they have."""
        with self._lock:
            adapter = self._known.pop(digest, None)
            if self._kept.pop(digest, None) is not None and adapter is not None:
                self._order(adapter, loads=False)

    def remove(self, digest: bytes, then: Callable[[], object] = lambda: None) -> bool:
        """Lets go of an adapter; requests that have it keep it until they end -> whether it was there. `then` is called
        when none has it."""
        with self._lock:
            self._pinned.discard(digest)
            self.slots.unpin(digest)
            adapter, there = self._known.get(digest), digest in self._kept
            if adapter is not None and adapter.users:
                self._removed[digest] = then
                return there
            self.forget(digest)
        then()
        return there

    def pin(self, digest: bytes) -> None:
        """Keeps an adapter in host memory, and its slot once it has one. ValueError if it is not there."""
        with self._lock:
            if digest not in self._kept:
                raise ValueError(
                    f"the adapter is not in host memory, where requests have all places ({self._limits.max_cpu_loras}, "
                    "max_cpu_loras); raise that, or pin it later"
                )
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
                self.forget(adapter.digest)
                for request in [each for each in plan.tokens if each.lora_slot == slot]:
                    fail(request, f"{adapter.what} cannot be written to the device: {why}")
            else:
                self._written[slot] = adapter.digest

    def _write(self, slot: int, adapter: LoadedLoRA) -> str:
        """Writes an adapter to a slot -> what went wrong; empty if nothing did."""
        try:
            for worker, packed in zip(self._ranks.workers, adapter.packed.ranks, strict=True):
                assert worker.lora is not None, "adapters are on"
                worker.lora.write(worker.platform, slot - 1, packed)
        except DeviceLost:
            raise
        except Exception as error:  # no memory left, or a fault of the platform's: it costs these requests alone
            logger.exception("%s cannot be written to slot %d", adapter.what, slot)
            return f"{type(error).__name__}: {error}"
        return ""

    def after_compute(self, scheduler: Scheduler, running: bool) -> None:
        """Drops what has no request any more, and has no place."""
        if self._role is LoRARole.FOLLOWS or not (self._removed or len(self._kept) > self._limits.max_cpu_loras):
            return
        on_device = {each.lora.digest for each in scheduler.running if each.lora is not None}
        with self._lock:
            if not self._make_room(lambda each: each.users == 0, on_device, spare=0):
                self.is_short = True  # requests wait that name what ended ones had: the queue decides
            known = {digest: self._known.get(digest) for digest in self._removed}
            ended = [digest for digest, adapter in known.items() if adapter is None or adapter.users == 0]
            following = [self._removed.pop(digest) for digest in ended]
            for digest in ended:
                self.forget(digest)
        for then in following:
            then()

    def reload_weights(self, weights: WeightFiles | Path | None) -> None:
        """Packs adapters again whose tensors depend on the model's weights. Requests whose adapter cannot be packed end
        with the reason."""
        with self._lock:
            for adapter in list(self._known.values()):
                if adapter.ready and adapter.packed.needs_base:
                    adapter.pack_again(self._logged_pack)
                    self._written = {slot: held for slot, held in self._written.items() if held != adapter.digest}

    def start_over(self) -> None:
        """Forgets what the device holds: it may have slept."""
        self._written.clear()

    def close(self) -> None:
        """Ends the threads; adapters that were not read are refused."""
        self.digests.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        for adapter in list(self._known.values()):
            adapter.close()


def first_refusal(channel: Channel | None, why: str) -> str:
    """Returns why a rank cannot go on with an adapter, with its number where ranks are processes; empty if all can.
    Each rank calls it at the same point, with its own reason or nothing."""
    if channel is None:
        return why
    notes = channel.exchange(why.encode()[:MAX_ERROR_BYTES])
    return next((f"rank {rank}: {note.decode(errors='ignore')}" for rank, note in enumerate(notes) if note), "")
