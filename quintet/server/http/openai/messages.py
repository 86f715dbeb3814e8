"""Parsed events of an answer as chat messages and deltas."""

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType

from quintet.chat.output_parser import OutputParser
from quintet.parsers import CallArguments, CallBegin, Content, Event, Reasoning, gather
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.openai.chat_protocol import AnswerMessage, CallPart, Delta, FunctionPart

_CHANNELS: dict[type, str] = {Reasoning: "reasoning", Content: "content"}  # all other events are of calls
_CHARACTERS_PER_PIECE = 2048  # characters: some milliseconds, and 10 of the worst


async def parse_all(speech: OutputParser, text: str, turns: CooperativeWork, cut: bool = False) -> list[Event]:
    """Returns the events that OutputParser.feed finds in a whole answer, a stretch in each turn."""
    stretches = [text[start : start + _CHARACTERS_PER_PIECE] for start in range(0, len(text), _CHARACTERS_PER_PIECE)]
    heard = await turns.run_all(functools.partial(speech.feed, each, ended=False) for each in stretches)
    return [event for events in heard for event in events] + speech.feed("", ended=True, cut=cut)


def deltas_of(events: Sequence[Event], blank: str | UnsetType = UNSET) -> list[Delta]:
    """Returns deltas for chunks in order, each of reasoning, content or calls. `blank`: the content where there is none
    of these."""
    groups = [list(group) for _, group in itertools.groupby(events, lambda event: _CHANNELS.get(type(event)))]
    return [delta for group in groups if (delta := _delta(group))] or [Delta(content=blank)]


def _delta(events: Sequence[Event]) -> Delta | None:
    """Returns the delta of events of one channel; None if they say nothing."""
    text = "".join(event.text for event in events if isinstance(event, Content))
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = _parts(events)
    if text:
        return Delta(content=text)
    if thought:
        return Delta(reasoning=thought, reasoning_content=thought)
    return Delta(tool_calls=calls) if calls else None


def message_of(events: Sequence[Event]) -> AnswerMessage:
    """A whole answer, as chats have it."""
    found = gather(events)
    calls = [
        CallPart(id=call.id or "", type="function", function=FunctionPart(call.name, call.arguments))
        for call in found.calls
    ]
    message = AnswerMessage(found.content if found.content or not (calls or found.reasoning) else None)
    if found.reasoning:
        message.reasoning = message.reasoning_content = found.reasoning
    if calls:
        message.tool_calls = calls
    return message


def arguments_object(arguments: str) -> dict[str, Any]:
    """Decodes the arguments. Of a call that was cut off it has the complete members, as in a stream that Anthropic's
    clients add up."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        with contextlib.suppress(ValueError):
            members: dict[str, Any] = pydantic_core.from_json(arguments, allow_partial=True)
            return members
        return {}


def _parts(events: Sequence[Event]) -> list[CallPart]:
    """One for each call: of several parts of the same call, clients read the first alone."""
    parts: dict[int, CallPart] = {}
    for event in events:
        if isinstance(event, CallBegin):
            named = FunctionPart(event.name, "")
            parts[event.index] = CallPart(index=event.index, id=event.id or "", type="function", function=named)
        elif isinstance(event, CallArguments):
            part = parts.setdefault(event.index, CallPart(index=event.index, function=FunctionPart()))
            part.function.arguments += event.text
    return list(parts.values())
