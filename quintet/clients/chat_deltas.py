"""The deltas of a streamed chat, as any OpenAI-compatible server writes them, become events."""

import json
from typing import Any

from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from quintet.parsers.formats import call_id


class ChatDeltaParser:
    """Parser of one answer's deltas. TypeError, ValueError, LookupError or AttributeError where something is no
    delta."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}  # a call's index at the server -> ours, which has no gaps
        self._whole: set[int] = set()

    def events(self, delta: dict[str, Any], ended: bool) -> list[Event]:
        """Returns the new events of a delta; at the end every call is whole."""
        events: list[Event] = []
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            events.append(Reasoning(_text(thought)))
        if text := delta.get("content"):
            events.append(Content(_text(text)))
        for part in delta.get("tool_calls") or ():
            events += self._part(part)
        if ended:
            events += [CallEnd(place) for place in range(len(self._places)) if place not in self._whole]
            self._whole.update(range(len(self._places)))
        return events

    def _part(self, part: dict[str, Any]) -> list[Event]:
        function = part.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments")
        number = part.get("index")
        if number is None:  # some servers give each call whole, and count none
            number = f"call {len(self._places) if name else len(self._places) - 1}"
        events: list[Event] = []
        if number not in self._places:
            events.append(CallBegin(len(self._places), _text(name), part.get("id") or call_id(_text(name), 0)))
            self._places[number] = len(self._places)
        if arguments:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            events.append(CallArguments(self._places[number], text))
        return events


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"must be text, not {type(value).__name__}")
    return value
