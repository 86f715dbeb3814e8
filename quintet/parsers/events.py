"""Parsed model output: the events of a stream, and the message that they add up to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments, an object; `strict`: they
    must follow it even where the model itself decides to call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class Reasoning:
    """Next piece of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """Next piece of the model's content."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins; `index` counts calls from 0. `id` is the one in the text, where the model writes one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments. All pieces of a complete call are the text of one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call's last event. One that is not complete was cut off or broken: its arguments are the beginning of an
    object, and must not be acted on."""

    index: int
    complete: bool = True


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON text: an object if the call is complete, the beginning of one otherwise."""

    name: str
    arguments: str
    id: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class Parsed:
    """A whole output. Text that is not there is empty."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def gather(events: Iterable[Event]) -> Parsed:
    """Returns the whole message that a stream's events add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    begins: list[CallBegin] = []
    arguments: list[list[str]] = []
    complete: dict[int, bool] = {}
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallBegin():
                begins.append(event)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
            case CallEnd(index, whole):
                complete[index] = whole
    calls = tuple(
        ToolCall(begin.name, "".join(pieces), begin.id, complete.get(begin.index, False))
        for begin, pieces in zip(begins, arguments, strict=True)
    )
    return Parsed("".join(reasoning), "".join(content), calls)


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind as one event."""
    groups: list[tuple[Event, list[str]]] = []
    for event in events:
        if isinstance(event, CallBegin | CallEnd):
            groups.append((event, []))
        elif groups and type(groups[-1][0]) is type(event):  # a call's end stands between pieces of two calls
            groups[-1][1].append(event.text)
        else:
            groups.append((event, [event.text]))
    return [_with_text(event, "".join(texts)) for event, texts in groups]


def _with_text(event: Event, text: str) -> Event:
    match event:
        case Reasoning():
            return Reasoning(text)
        case Content():
            return Content(text)
        case CallArguments(index):
            return CallArguments(index, text)
    return event


@dataclass
class MessageBuilder:
    """An answer so far."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(_, name, call_id):
                    self.calls.append(ToolCall(name, "", call_id, complete=False))
                case CallArguments(index, text):
                    self.calls[index] = replace(self.calls[index], arguments=self.calls[index].arguments + text)
                case CallEnd(index, complete):
                    self.calls[index] = replace(self.calls[index], complete=complete)

    def message(self) -> dict[str, Any]:
        """Returns the message in OpenAI's format. Calls that broke off are left out: they cannot be answered."""
        whole = [each for each in self.calls if each.complete]
        message: dict[str, Any] = {"role": "assistant", "content": self.content if self.content or not whole else None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if whole:
            message["tool_calls"] = [
                {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for each in whole
            ]
        return message
