"""Converts Ollama's messages, tools and format to those of chat templates."""

from collections.abc import Mapping
from typing import Any

from quintet.chat.reasoning_effort import ReasoningSettings, read_effort
from quintet.chat.validation import kind_of, list_of, text_of
from quintet.media.items import IMAGE
from quintet.media.parts import MediaPart
from quintet.parsers import ToolParser
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.server.http.inputs.response_format import read_format

Message = dict[str, Any]

_CALLS = 'calls such as {"function": {"name": ..., "arguments": {...}}}'


def template_messages(given: Any, parser: ToolParser | None) -> list[Message]:
    """Returns messages as chat templates read them; calls and their results get ids where they have none.

    Raises ParameterError with the place.
    """
    messages: list[Message] = []
    waiting: list[Message] = []  # calls without a result
    count = 0
    for place, message in enumerate(list_of(given, "messages", "a list of messages")):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise ParameterError(where, f"must be an object with role and content, not {kind_of(message)}")
        message = dict(message)
        add_images(message, message.pop("images", None), f"{where}.images")
        if message.get("tool_calls"):
            waiting = _calls(message["tool_calls"], f"{where}.tool_calls", parser, count)
            count += len(waiting)
            message["tool_calls"] = list(waiting)
        if message.get("role") == "tool":
            _name_result(message, waiting)
        messages.append(message)
    return messages


def add_images(message: Message, images: Any, where: str) -> None:
    """Puts images, as base64, before the text of a message. Raises ParameterError with the place."""
    if not images:
        return
    parts: list[Any] = []
    for number, image in enumerate(list_of(images, where, "a list of images in base64")):
        data = text_of(image, f"{where}[{number}]")
        if data.startswith(("http:", "https:", "file:")):
            raise ParameterError(f"{where}[{number}]", "is a URL, and must be the image's bytes in base64")
        url = data if data.startswith("data:") else f"data:;base64,{data}"
        parts.append(MediaPart(IMAGE, f"{where}[{number}]", url))
    content = message.get("content")
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    message["content"] = [*parts, *(text if isinstance(text, list) else [text])]


def _calls(given: Any, where: str, parser: ToolParser | None, count: int) -> list[Message]:
    calls = []
    for number, call in enumerate(list_of(given, where, _CALLS)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ParameterError(f"{where}[{number}]", f"must be one of {_CALLS}")
        name = function["name"]
        made = f"call_{count + number}" if parser is None else parser.call_id(name, count + number)
        function = {"name": name, "arguments": function.get("arguments")}
        calls.append({"id": call.get("id") or made, "type": "function", "function": function})
    return calls


def _name_result(message: Message, waiting: list[Message]) -> None:
    """Adds the id of the call that a result answers: the first one of its name, or the first one."""
    name = message.pop("tool_name", None) or message.get("name")
    if not message.get("tool_call_id") and waiting:
        call = next((call for call in waiting if call["function"]["name"] == name), waiting[0])
        message["tool_call_id"], name = call["id"], name or call["function"]["name"]
    if name:
        message["name"] = name
    waiting[:] = [call for call in waiting if call["id"] != message.get("tool_call_id")]


def is_prefill(messages: list[Message]) -> bool:
    """True if the model continues the last message, as Ollama's templates do."""
    last = messages[-1]
    return last.get("role") == "assistant" and bool(last.get("content")) and not last.get("tool_calls")


def template_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns tools with their type, which Ollama's clients may leave out."""
    return [{"type": "function", **tool} if isinstance(tool, Mapping) else tool for tool in tools or ()]


def read_ollama_format(given: Any) -> StructuredOutputsParams | None:
    """Reads `format`: "json", or a JSON schema. Raises ParameterError."""
    if given is None or given == "":
        return None
    if given == "json":
        return read_format({"type": "json_object"}, "format")
    if not isinstance(given, dict):
        raise ParameterError("format", f'must be "json" or a JSON schema, not {str(given)[:80]!r}')
    return read_format({"type": "json_schema", "schema": given}, "format")


def read_think(given: Any) -> ReasoningSettings:
    """Reads `think`: true, false, or an effort. Raises ParameterError."""
    if given is None or isinstance(given, bool):
        return ReasoningSettings(given)
    return ReasoningSettings().with_effort(read_effort(given, "think"))
