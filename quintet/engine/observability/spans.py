"""Spans of an engine's steps while a trace runs: stretches of time with a name."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quintet.outputs import TokenDelta


class TraceEvent(NamedTuple):
    """One stretch of time."""

    name: str
    kind: str
    track: int | str  # the thread, or what a platform calls its own
    started: int  # ns of the Unix clock, as the platform's are
    ended: int
    arguments: dict[str, Any] | None


class CounterSample(Protocol):
    """An object that has counts for a trace."""

    @property
    def counts(self) -> dict[str, int]: ...


class Spans:
    """Spans of one engine. `events` is a list while a trace runs: callers check it first, so that without a trace a
    step pays for a few checks. One thread at a time steps, and those of several ranks add to it."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] | None = None
        self.shapes = False  # whether ops record those of their tensors
        self._whole = self._last = 0

    def start(self, shapes: bool = False) -> None:
        """Starts a trace."""
        self.shapes = shapes
        self._whole = self._last = time.time_ns()
        self.events = []

    def begin(self) -> None:
        """A step begins, and its first part."""
        self._whole = self._last = time.time_ns()

    def lap(self, name: str, subject: CounterSample | list[TokenDelta] | None = None) -> None:
        """Records the time since the part before it, or since begin(); its arguments are the subject's counts."""
        now = time.time_ns()
        self._tell(name, self._last, now, subject)
        self._last = now

    def end(self, name: str, subject: CounterSample) -> None:
        """The whole, since begin()."""
        self._last = time.time_ns()
        self._tell(name, self._whole, self._last, subject)

    def _tell(self, name: str, began: int, ended: int, subject: CounterSample | list[TokenDelta] | None) -> None:
        counts = _of_deltas(subject) if isinstance(subject, list) else subject.counts if subject is not None else {}
        self.add(name, "engine", threading.get_ident(), began, ended, **counts)

    def add(self, name: str, kind: str, track: int | str, began: int, ended: int, **arguments: Any) -> None:
        """Adds an event that the caller has timed."""
        if self.events is not None:
            self.events.append(TraceEvent(name, kind, track, began, ended, arguments or None))

    def wrap_op(self, op: str, provider: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps an op to record each of its calls: on a device that works behind the host, how long the call takes."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.events is None:
                return function(*args, **kwargs)
            began = time.time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                ended = time.time_ns()
                shapes = {"shapes": _shapes(args)} if self.shapes else {}
                self.add(op, "op", threading.get_ident(), began, ended, provider=provider, **shapes)

        return call


def _of_deltas(deltas: list[TokenDelta]) -> dict[str, int]:
    return {"requests": len(deltas), "tokens": sum(len(delta.token_ids) for delta in deltas)}


def _shapes(args: tuple[Any, ...]) -> list[list[int]]:
    return [list(each.shape) for each in args if hasattr(each, "shape")]
