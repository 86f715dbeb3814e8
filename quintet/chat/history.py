"""Histories as clients send them back: other ways to write a conversation that a chat template refuses."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
SYSTEM = ("system", "developer")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # types of parts that are no text of the answer


class TemplateRefused(ValueError):
    """A chat template does not take the messages: their order, a role, or what is in them."""


def split_thoughts(content: Any) -> tuple[Any, str]:
    """Returns a message's content without its parts of reasoning, and their text."""
    if not isinstance(content, list) or not any(_is_thought(part) for part in content):
        return content, ""
    texts = [_thought(part) for part in content if _is_thought(part)]
    return [part for part in content if not _is_thought(part)], "\n\n".join(filter(None, texts))


def _is_thought(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in THOUGHTS


def _thought(part: Mapping[str, Any]) -> str:
    text = next((part[key] for key in ("thinking", "text", "summary") if part.get(key)), "")
    if isinstance(text, list):  # of parts with text
        text = "\n".join(str(each["text"]) for each in text if isinstance(each, Mapping) and "text" in each)
    return text if isinstance(text, str) else ""


def arguments_of(given: Any) -> Any:
    """Returns a call's arguments as an object, which templates want; what is none stays as it is."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given, strict=False)
    except (ValueError, RecursionError):
        return given
    return {} if value is None else value


def rewrites(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields other ways to write the messages, for a template that refuses them; each has the changes before it."""
    current = list(messages)
    for change in (_objects, _filled, _joined_system):
        changed = change(current)
        if changed != current:
            current = changed
            yield current


def _objects(messages: list[Message]) -> list[Message]:
    """Arguments that are no object, but text or a list, are none."""

    def mended(call: Any) -> Any:
        function = call.get("function", call)
        if not isinstance(function, dict) or isinstance(function.get("arguments"), dict):
            return call
        function = {**function, "arguments": {}}
        return {**call, "function": function} if "function" in call else function

    return [
        {**message, "tool_calls": [mended(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _filled(messages: list[Message]) -> list[Message]:
    """Messages without content have an empty text."""
    return [message if "content" in message else {**message, "content": ""} for message in messages]


def _joined_system(messages: list[Message]) -> list[Message]:
    """The texts of all system messages are in the first message."""
    system = [message for message in messages if message["role"] in SYSTEM]
    others = [message for message in messages if message["role"] not in SYSTEM]
    if not system or messages[:1] == system:
        return messages
    contents = [message.get("content", "") for message in system]
    if all(isinstance(content, str) for content in contents):
        joined: Any = "\n\n".join(contents)
    else:
        joined = [part for content in contents for part in _parts(content)]
    return [{**system[0], "role": "system", "content": joined}, *others]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def first_that_renders(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Returns the text of the messages, or of the first of their rewrites that is not refused."""
    try:
        return render(messages)
    except TemplateRefused as error:
        for changed in rewrites(messages):
            try:
                return render(changed)
            except TemplateRefused:
                continue
        raise error
