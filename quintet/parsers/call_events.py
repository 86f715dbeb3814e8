"""Turns what a shape reads into events: no call is announced before its name is known and its arguments have begun."""

from collections.abc import Callable, Mapping
from typing import Any

from quintet.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quintet.parsers.scanner import MalformedText, Scanner
from quintet.parsers.schema import argument_types

MAX_CALLS = 1024  # of one output
NOTHING: Mapping[str, Any] = {}


class CallEventBuilder:
    """The calls of one output. Until one is announced, what was read of it is kept, to be content if it is broken."""

    def __init__(
        self,
        scan: Scanner,
        emit: Callable[[Event], None],
        schemas: Mapping[str, Mapping[str, Any]],
        whole: bool = False,
    ) -> None:
        """`whole`: no call is announced before its end."""
        self._scan, self._emit, self._schemas, self._whole_calls = scan, emit, schemas, whole
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # of a tool's argument
        self.count = 0  # of calls that were announced and have ended
        self._clear()

    def _clear(self) -> None:
        self._name: str | None = None
        self._id: str | None = None
        self._written: list[str] = []
        self._announced = self._whole = self._literal = False

    def begin(self) -> None:
        """A call may begin here."""
        if self.count == MAX_CALLS:
            raise MalformedText
        self._clear()

    def set_name(self, name: str) -> None:
        """The call's name is known; its arguments may already be."""
        if not name or self._name is not None:
            raise MalformedText
        self._name = name
        self._announce()

    def hold(self) -> None:
        """The call is not announced before its end."""
        self._literal = True

    def set_id(self, id: str) -> None:
        self._id = id

    def knows(self, name: str) -> bool:
        """True for the name of a tool of the request."""
        return name in self._schemas

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The schema of the call's arguments; empty if its tool is not of the request."""
        return self._schemas.get(self._name or "", NOTHING)

    def types(self, argument: str, written: str = "") -> frozenset[str]:
        """The JSON types that the call's tool takes for it; where it takes no such argument, the type that the model
        has `written`."""
        key = self._name or "", argument
        if key not in self._types:
            if len(self._types) >= MAX_CALLS:
                self._types.clear()  # a model that makes names up
            self._types[key] = argument_types(self.parameters, argument, {"type": written} if written else None)
        return self._types[key]

    def write(self, text: str) -> None:
        """More JSON of the arguments. The opening brace alone announces nothing: many a text has one."""
        if self._announced and text:
            self._emit(CallArguments(self.count, text))
        elif text:
            self._written.append(text)
            self._announce()

    def _announce(self) -> None:
        if not (self._literal or self._whole_calls):
            self._release()

    def _release(self) -> None:
        if self._name is None or len(self._written) < 2 or self._announced:
            return
        self._announced = True
        self._emit(CallBegin(self.count, self._name, self._id))
        self._emit(CallArguments(self.count, "".join(self._written)))
        self._scan.records_consumed = False
        self._scan.forget()

    def complete_arguments(self) -> None:
        """Its arguments are complete."""
        self._whole = True

    @property
    def has_no_arguments(self) -> bool:
        """True if the call has no arguments yet."""
        return not self._written

    def close(self) -> None:
        """The call is complete."""
        self._release()
        if not self._announced:
            raise MalformedText
        self.abandon()

    def abandon(self, cut: bool = False) -> None:
        """Nothing more comes of the call, if one was begun. `cut`: because the output was cut off."""
        if self._whole or (cut and not self._literal):
            self._release()
        if self._announced:
            self._emit(CallEnd(self.count, self._whole))
            self.count += 1
        self._scan.records_consumed = True
        self._clear()


class LateEnd:
    """Holds the first content behind a thought, which a second end makes thought: a budget set the first end, and the
    model writes the other. `most`: its characters; 0: none."""

    def __init__(self, emit: Callable[[Event], None], most: int) -> None:
        self._emit, self._most = emit, most
        self._held: list[str] | None = None

    def close(self, first: bool) -> None:
        """An end of a thought. `first`: the one that stands behind the thought."""
        if first:
            self._held = [] if self._most else None
        elif self._held:
            text, self._held = "".join(self._held), None
            self._emit(Reasoning(text))

    def add(self, event: Event) -> None:
        """The next event."""
        if self._held is None:
            self._emit(event)
        elif isinstance(event, Content):
            self._held.append(event.text)
            if sum(map(len, self._held)) > self._most:
                self.release()
        else:
            self.release()
            self._emit(event)

    def release(self) -> None:
        """Emits what is held: it is content."""
        held, self._held = self._held, None
        if held:
            self._emit(Content("".join(held)))
