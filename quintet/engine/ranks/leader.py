"""Rank 0's engine, where ranks are processes: whatever it is asked, the others are told before it happens."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from quintet.engine.engine import Engine
from quintet.engine.grammar import Matcher, wait_for_any
from quintet.engine.interrupts import Uninterrupted
from quintet.engine.ranks import inbox
from quintet.engine.request import Admitted
from quintet.engine.stats import Stats
from quintet.engine.weight_files import Weights
from quintet.outputs import TokenDelta
from quintet.platforms.interface import ASIDE, Channel, DeviceLost

T = TypeVar("T")

LONGEST = 800  # bytes of an error that other ranks are told
MENDABLE = (ValueError, NotImplementedError, OSError, MemoryError)  # after which an engine is as it was


class Leader(Engine):
    """What was added or aborted goes out with the next step. Ctrl-C waits for a step's end: the others are in it."""

    _channel: Channel | None = None
    _name = "rank 0"

    def lead(self, channel: Channel) -> None:
        """From now on; what was done before, every rank did by itself."""
        self._channel, self._items, self._number = channel, list[Any](), 0
        # requests whose grammars this rank still compiles, as the others do: no other has heard of them
        self._held: dict[str, tuple[Admitted, Matcher]] = {}

    def __len__(self) -> int:
        return super().__len__() + (0 if self._channel is None else len(self._held))

    @property
    def busy(self) -> bool:
        """Also where a rank is gone: the next step says so."""
        return super().busy or (self._channel is not None and bool(self._held or self._channel.stopped))

    def add(self, admitted: Admitted) -> None:
        """One whose grammar is not compiled yet comes in when it is: it must be there on every rank."""
        if self._channel is None:
            return super().add(admitted)
        inbox.added(admitted)  # or why it cannot be
        if admitted.request_id in self._held:
            raise ValueError(f"request id {admitted.request_id!r} is in use; give each running request its own")
        matcher = self._grammars.matcher(admitted.grammar) if admitted.grammar and self._grammars else None
        if matcher is None or matcher.ready or admitted.request_id in self._answers.requests:
            return self._enter(admitted)
        self.check_awake()
        self._items.append(inbox.Compile(admitted.grammar))
        self._held[admitted.request_id] = admitted, matcher

    def _enter(self, admitted: Admitted) -> None:
        super().add(admitted)
        self._items.append(inbox.added(admitted))

    def _heed_held(self) -> None:
        """Lets in those whose grammars are compiled; where there is nothing else to do, waits a moment for one."""
        if len(self._held) == len(self):
            wait_for_any(matcher for _, matcher in self._held.values())
        for request_id, (admitted, matcher) in list(self._held.items()):
            why = matcher.refused()
            if why or matcher.ready:
                del self._held[request_id]
            if why:
                error = f"structured_outputs cannot be served: {why}"
                self._deltas.append(TokenDelta(request_id, [], finish_reason="error", error=error))
            elif matcher.ready:
                self._enter(admitted)

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(dict.fromkeys(request_ids))
        if self._channel is not None and ids:
            self._items.append(inbox.aborted(ids))
            for request_id in ids:
                self._held.pop(request_id, None)
        super().abort(ids)

    def stats(self) -> Stats:
        told = super().stats()
        held = 0 if self._channel is None else len(self._held)
        return replace(told, num_waiting=told.num_waiting + held, num_deferred=told.num_deferred + held)

    def reset_prefix_cache(self) -> None:
        if self._channel is not None:
            self._items.append(inbox.ResetPrefixCache())
        super().reset_prefix_cache()

    def compute(self) -> None:
        if self._channel is None:
            return super().compute()
        with Uninterrupted():
            if self._held:
                self._heed_held()
            self._tell(None)
            try:
                super().compute()
            except DeviceLost:
                raise
            except BaseException as error:  # a step that no rank can end: the others would wait for it
                self._channel.stop(f"{self._name} broke: {type(error).__name__}: {error}")
                raise

    def sleep(self, level: int = ASIDE) -> int:
        if self._channel is not None and self._held:
            raise ValueError(f"the engine has {len(self)} requests; let them finish, or abort them, before it sleeps")
        return self.jointly(inbox.Sleep(level), lambda: super(Leader, self).sleep(level))

    def wake_up(self) -> None:
        self.jointly(inbox.WakeUp(), super().wake_up)

    def reload_weights(self, folder: Path | Weights | None) -> None:
        path = folder.folder if isinstance(folder, Weights) else folder
        order = inbox.Reload(None if path is None else str(path))
        self.jointly(order, lambda: super(Leader, self).reload_weights(folder))

    def jointly(self, order: inbox.Joint, work: Callable[[], T]) -> T:
        """Work that every rank does, and none alone: where it fails on all alike it may be tried again."""
        if self._channel is None:
            return work()
        with Uninterrupted():
            self._tell(order)
            return together(self._channel, work)

    def _tell(self, joint: inbox.Joint | None) -> None:
        assert self._channel is not None
        self._number += 1
        traced = self.profiler.running and self._spans.events is not None
        items, self._items = self._items, []
        self._channel.tell(inbox.encode(self._number, items, traced, joint))


def together(channel: Channel, work: Callable[[], T]) -> T:
    """The work, which the other ranks do at the same time. What only some could do is done for none: DeviceLost."""
    try:
        result = work()
    except MENDABLE as error:
        said = channel.exchange(f"{type(error).__name__}: {error}".encode()[:LONGEST])
        if all(said):
            raise
    else:
        said = channel.exchange(b"")
        if not any(said):
            return result
    rank = next(rank for rank, each in enumerate(said) if each)
    why = f"rank {rank} of {len(said)} failed, and not all did: {said[rank].decode(errors='ignore')}"
    channel.stop(why)
    raise DeviceLost(why)
