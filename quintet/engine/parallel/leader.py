"""Engine of rank 0, where ranks are processes: all its calls are sent to the other ranks, too, before a step."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from quintet.common.interrupts import DeferredSigint
from quintet.engine.engine import Engine, EngineParts
from quintet.engine.needs import Need, refusal, wait_for_any
from quintet.engine.observability.stats import Stats
from quintet.engine.parallel import commands as inbox
from quintet.engine.request import CoreRequest
from quintet.interface.platform import ASIDE, Channel, DeviceLost
from quintet.lora.request import LoRAReference
from quintet.model_loader.weight_files import WeightFiles
from quintet.outputs import TokenDelta

T = TypeVar("T")

MAX_ERROR_BYTES = 800  # bytes of an error that other ranks receive
RECOVERABLE = (ValueError, NotImplementedError, OSError, MemoryError)  # after which an engine is as it was


class Leader(Engine):
    """Sends added and aborted requests with the next step. Ctrl-C waits for a step's end: the others are in it."""

    _name = "rank 0"

    def __init__(self, parts: EngineParts, channel: Channel) -> None:
        super().__init__(parts)
        self._channel, self._items, self._number = channel, list[Any](), 0
        # requests with grammars and adapters that this rank still makes, as the others do: not sent to the others yet
        self._held: dict[str, tuple[CoreRequest, list[Need]]] = {}

    def __len__(self) -> int:
        return super().__len__() + len(self._held)

    @property
    def busy(self) -> bool:
        """True also where a rank is gone: the next step reports it."""
        return super().busy or bool(self._held or self._channel.aborted)

    def add(self, admitted: CoreRequest) -> None:
        """Adds a request; it enters when its grammar and its adapter are there, as they must be on every rank."""
        inbox.make_add(admitted)  # or why it cannot be
        if admitted.request_id in self._held:
            raise ValueError(f"request id {admitted.request_id!r} is in use; give each running request its own")
        found: tuple[Need | None, ...] = (self._matcher(admitted), self._adapter(admitted))
        needs = [need for need in found if need is not None]
        ready = all(need.ready for need in needs) and self._is_confirmed(admitted)
        if ready or admitted.request_id in self._answers.requests:
            return self._enter(admitted)
        self.check_awake()
        if admitted.grammar:
            self._items.append(inbox.CompileCommand(admitted.grammar))
        if admitted.lora is not None:
            self._items.append(inbox.LoadAdapterCommand(admitted.lora))
        self._held[admitted.request_id] = admitted, needs

    def _enter(self, admitted: CoreRequest) -> None:
        super().add(admitted)
        self._items.append(inbox.make_add(admitted))

    def _add_ready(self) -> None:
        """Enters requests that have what they need; where there is nothing else to do, waits a moment for one."""
        unready = [[need for need in needs if not need.ready] for _, needs in self._held.values()]
        if len(self._held) == len(self) and all(unready):
            wait_for_any(need for needs in unready for need in needs)
        for request_id, (admitted, needs) in list(self._held.items()):
            why, ready = refusal(needs), all(need.ready for need in needs)
            if ready and not self._is_confirmed(admitted):
                why = self._confirm(admitted)
            if why or ready:
                del self._held[request_id]
            if why:
                self._deltas.append(TokenDelta(request_id, [], finish_reason="error", error=why))
            elif ready:
                self._enter(admitted)

    def _is_confirmed(self, admitted: CoreRequest) -> bool:
        """True if all ranks have a request's adapter: a request that entered before has it, and holds it there."""
        if admitted.lora is None:
            return True
        digest = admitted.lora.digest
        return any(each.lora is not None and each.lora.digest == digest for each in self._answers.requests.values())

    def _confirm(self, admitted: CoreRequest) -> str:
        """Asks all ranks for a request's adapter -> why it cannot be served; empty if all have it."""
        assert admitted.lora is not None
        self._tell(inbox.ConfirmAdapterCommand(admitted.lora))
        if why := confirm_adapter(self, admitted.lora, self._channel):
            return f"the adapter {admitted.lora.name!r} cannot be served: {why}"
        return ""

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(request_ids))
        if ids:
            self._items.append(inbox.make_abort(ids))
            for request_id in ids:
                self._held.pop(request_id, None)
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

    def wake_up(self) -> None:
        self.run_collective(inbox.WakeUpCommand(), super().wake_up)

    def reload_weights(self, folder: Path | WeightFiles | None) -> None:
        path = folder.folder if isinstance(folder, WeightFiles) else folder
        order = inbox.ReloadCommand(None if path is None else str(path))
        self.run_collective(order, lambda: super(Leader, self).reload_weights(folder))

    def run_collective(self, order: inbox.CollectiveCommand, work: Callable[[], T]) -> T:
        """Runs work that every rank does, and none alone: where it fails on all alike it may be tried again."""
        with DeferredSigint():
            self._tell(order)
            return run_on_all_ranks(self._channel, work)

    def _tell(self, joint: inbox.CollectiveCommand | None) -> None:
        self._number += 1
        traced = self.profiler.spans.events is not None
        items, self._items = self._items, []
        self._channel.broadcast(inbox.encode(self._number, items, traced, joint))


def confirm_adapter(engine: Engine, reference: LoRAReference, channel: Channel) -> str:
    """Waits for an adapter on this rank, and tells the others how that ended -> why one of them has not got it."""
    assert engine.lora is not None, "all ranks have the same settings"
    notes = channel.exchange(engine.lora.load(reference).wait().encode()[:MAX_ERROR_BYTES])
    return next((f"rank {rank}: {note.decode(errors='ignore')}" for rank, note in enumerate(notes) if note), "")


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
