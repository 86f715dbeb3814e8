"""Engine of rank 0, where ranks are processes: all its calls are sent to the other ranks, too, before a step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quintet.common.interrupts import DeferredSigint
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.lora.loaded import LoadedLoRA
from quintet.engine.needs import Need, refusal, wait_for_any
from quintet.engine.observability.stats import Stats
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.adapters import MAX_ADAPTERS, AgreedAdapters, agree_on_adapters
from quintet.engine.parallel.together import run_together
from quintet.engine.request import CoreRequest, FinishReason
from quintet.engine.scheduler import MAX_OVERTAKEN
from quintet.engine.sleep import check_tags
from quintet.engine.weight_transfer.orders import PauseCommand, WeightOrder
from quintet.interface.platform import ASIDE, Channel, DeviceLost
from quintet.lora.request import LoRAReference
from quintet.model_loader.weight_files import WeightFiles
from quintet.outputs import TokenDelta
from quintet.structured_output.grammar import Matcher

T = TypeVar("T")

MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive
RECOVERABLE = (ValueError, NotImplementedError, OSError, MemoryError)  # after which an engine is as it was


@dataclass
class HeldRequest:
    """A request that is not sent to the other ranks yet: not all have what it needs."""

    admitted: CoreRequest
    matcher: Matcher | None
    lora: LoadedLoRA | None
    num_overtaken: int = 0  # requests with adapters that entered before it, while its adapter had no place

    @property
    def needs(self) -> list[Need]:
        found: tuple[Need | None, ...] = self.matcher, self.lora
        return [need for need in found if need is not None]

    @property
    def can_be_ready(self) -> bool:
        """True if this rank has what it needs."""
        return all(need.ready or need.refused() for need in self.needs)

    @property
    def ready(self) -> bool:
        """True if all ranks have what it needs."""
        return (self.matcher is None or self.matcher.ready) and (self.lora is None or self.lora.confirmed)


class Leader(Engine):
    """Sends added and aborted requests with the next step. Ctrl-C waits for a step's end: the others are in it."""

    _name = "rank 0"

    def __init__(self, parts: EngineParts, channel: Channel) -> None:
        super().__init__(parts)
        self._channel, self._items, self._number = channel, list[Any](), 0
        # requests with grammars and adapters that are made on all ranks first: not sent to the others yet
        self._held: dict[str, HeldRequest] = {}

    def __len__(self) -> int:
        return super().__len__() + len(self._held)

    @property
    def busy(self) -> bool:
        """True also where a rank is gone, which the next step reports, or has to hear of an adapter."""
        heard = self.lora is None or not self.lora.orders
        return super().busy or bool(self._held or self._channel.aborted) or not heard

    def add(self, admitted: CoreRequest) -> None:
        """Adds a request; it enters when its grammar and its adapter are there, as they must be on every rank."""
        inbox.make_add(admitted)  # or why it cannot be
        self._check_id(admitted)
        self.check_awake()
        held = HeldRequest(admitted, self._matcher(admitted), self._adapter(admitted))
        first = not self._held
        self._held[admitted.request_id] = held
        if held.ready and (held.lora is None or first):  # else in its turn
            self._enter(admitted)
        elif admitted.grammar:
            self._items.append(inbox.CompileCommand(admitted.grammar))

    def _check_id(self, admitted: CoreRequest) -> None:
        request_id = admitted.request_id
        if request_id in self._held or request_id in self._answers.requests:
            raise ValueError(f"request id {request_id!r} is in use; give each running request its own")

    def _release(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None and held.lora is not None:
            held.lora.users -= 1

    def _enter(self, admitted: CoreRequest) -> None:
        try:
            super().add(admitted)
        finally:
            self._release(admitted.request_id)
        self._send_adapter_orders()  # before it, in the order in which they were given
        self._items.append(inbox.make_add(admitted))

    def _send_adapter_orders(self) -> None:
        """Adapters that enter or leave this rank's host memory do so on the others."""
        for order in self.lora.take_orders() if self.lora is not None else ():
            digest = order.reference.digest
            self._items.append(
                inbox.LoadAdapterCommand(order.reference) if order.loads else inbox.DropAdapterCommand(digest)
            )

    def _advance_adapters(self) -> None:
        """Adapters of requests that have entered keep their places, which the other ranks count on; others get them in
        the order of the requests that are held."""
        if self.lora is not None and self.lora.is_short:
            running, waiting = self.scheduler.running, self.scheduler.waiting
            entered = {each.lora.digest for each in waiting if each.lora is not None}
            on_device = {each.lora.digest for each in running if each.lora is not None}
            self.lora.advance(self._held_adapters().values(), entered, on_device)

    def _add_ready(self) -> None:
        """Enters requests that have what they need; where there is nothing else to do, waits a moment for one."""
        self._advance_adapters()
        refused, blocked = self._agree_on_adapters(idle=len(self._held) == len(self)), None
        for request_id, held in list(self._held.items()):
            why = refusal([] if held.matcher is None else [held.matcher])
            if held.lora is not None and held.lora.digest in refused:
                why = f"{held.lora.what} cannot be served: {refused[held.lora.digest]}"
            if why:
                self._release(request_id)
                self._deltas.append(TokenDelta(request_id, [], finish_reason="error", error=why))
            elif held.ready and (held.lora is None or blocked is None or blocked.num_overtaken < MAX_OVERTAKEN):
                self._enter(held.admitted)
                if blocked is not None:
                    blocked.num_overtaken += held.lora is not None
            elif blocked is None and held.lora is not None and not held.lora.has_place:
                blocked = held

    def _agree_on_adapters(self, idle: bool) -> dict[bytes, str]:
        """Learns which adapters of held requests all ranks have -> why others cannot be served. Waits a moment where
        the ranks are idle and no request has what it needs."""
        if idle and not any(held.ready or held.can_be_ready for held in self._held.values()):
            wait_for_any(need for held in self._held.values() for need in held.needs if not need.ready)
        here = self._held_adapters()
        found = {digest: each.refused() for digest, each in here.items() if each.refused()}
        asked = [each.reference for each in here.values() if each.ready and not each.confirmed][:MAX_ADAPTERS]
        if asked:
            self._tell(inbox.ConfirmAdaptersCommand(asked, idle))
        return self._confirm(asked, idle, found)

    def _held_adapters(self) -> dict[bytes, LoadedLoRA]:
        """Returns the adapters of held requests, in the order of these."""
        return {each.lora.digest: each.lora for each in self._held.values() if each.lora is not None}

    def _confirm(self, asked: list[LoRAReference], idle: bool, refused: dict[bytes, str]) -> dict[bytes, str]:
        """Compares adapters with the other ranks -> why these, and those that are `refused`, cannot be served."""
        if self.lora is None:
            return {}
        found = agree_on_adapters(self.lora, asked, self._channel, idle) if asked else AgreedAdapters([], {})
        for reference in found.ready:
            self.lora.find(reference).confirmed = True
        for digest in (refused := refused | found.refused):
            self.lora.forget(digest)
        return refused

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(request_ids))
        if ids:
            self._items.append(inbox.make_abort(ids))
            for request_id in ids:
                self._release(request_id)
        super().abort(ids)

    def _end_late_requests(self) -> None:
        """Ends them on every rank, before the next step is announced; during that step none is found."""
        if late := self._late_requests():
            self._items.append(inbox.make_abort([request.request_id for request in late]))
        super()._end_late_requests()

    def stats(self) -> Stats:
        stats, held = super().stats(), len(self._held)
        queues = replace(stats.scheduler, num_waiting=stats.scheduler.num_waiting + held)
        return replace(stats, scheduler=queues, num_deferred=stats.num_deferred + held)

    def reset_prefix_cache(self) -> None:
        self._items.append(inbox.ResetPrefixCacheCommand())
        super().reset_prefix_cache()

    def compute(self) -> None:
        if self.controls.blocks_steps:
            return self.controls.wait()
        with DeferredSigint():
            if self._held:
                self._add_ready()
            self._end_late_requests()
            self._tell(None)
            try:
                super().compute()
            except DeviceLost:
                raise
            except BaseException as error:  # a step that no rank can end: the others would wait for it
                self._channel.abort(f"{self._name} broke: {type(error).__name__}: {error}")
                raise

    def sleep(self, level: int = ASIDE) -> int:
        if self._held:
            raise ValueError(f"the engine has {len(self)} requests; let them finish, or abort them, before it sleeps")
        return self.run_collective(inbox.SleepCommand(level), lambda: super(Leader, self).sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        wakes = list(check_tags(tags))
        self.run_collective(inbox.WakeUpCommand(wakes), lambda: super(Leader, self).wake_up(wakes))

    def reload_weights(self, folder: Path | WeightFiles | None) -> None:
        path = folder.folder if isinstance(folder, WeightFiles) else folder
        order = inbox.ReloadCommand(None if path is None else str(path))
        self.run_collective(order, lambda: super(Leader, self).reload_weights(folder))

    def _agree(self, order: WeightOrder, work: Callable[[], T]) -> T:
        with DeferredSigint():
            if isinstance(order, PauseCommand) and order.mode == "abort":
                for request_id in list(self._held):
                    self._release(request_id)
                    self._deltas.append(TokenDelta(request_id, [], finish_reason=FinishReason.ABORT.value))
            self._tell(order)
            result: T = run_together(self._channel, self.controls, order, work)
            return result

    def run_collective(self, order: inbox.CollectiveCommand, work: Callable[[], T]) -> T:
        """Runs work that every rank does, and none alone: where it fails on all alike it may be tried again."""
        with DeferredSigint():
            self._tell(order)
            return run_on_all_ranks(self._channel, work)

    def _tell(self, joint: inbox.CollectiveCommand | None) -> None:
        self._number += 1
        self._send_adapter_orders()
        if self.drafting is not None and (costs := self.drafting.take_costs()):
            self._items.append(inbox.DraftCostsCommand(costs))
        traced = self.profiler.spans.events is not None
        items, self._items = self._items, []
        self._channel.broadcast(inbox.encode(self._number, items, traced, joint))


def run_on_all_ranks(channel: Channel, work: Callable[[], T]) -> T:
    """Runs work that the other ranks run at the same time. If some fail and others do not, it fails on all:
    DeviceLost."""
    try:
        result = work()
    except RECOVERABLE as error:
        errors = channel.exchange(f"{type(error).__name__}: {error}".encode()[:MAX_ERROR_BYTES])
        if all(errors):
            raise
    else:
        errors = channel.exchange(b"")
        if not any(errors):
            return result
    rank = next(rank for rank, each in enumerate(errors) if each)
    why = f"rank {rank} of {len(errors)} failed, and not all did: {errors[rank].decode(errors='ignore')}"
    channel.abort(why)
    raise DeviceLost(why)
