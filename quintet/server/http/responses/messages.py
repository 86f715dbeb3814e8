"""Converts the items of a conversation to chat template messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quintet.chat.history import arguments_of
from quintet.sampling_params import ParameterError
from quintet.server.http.inputs.media_parts import MEDIA_PARTS, as_media
from quintet.server.http.responses.mcp.approvals import approvals_as_calls
from quintet.server.http.responses.protocol import Item
from quintet.server.http.responses.tool_items import PASSED_OVER

Message = dict[str, Any]


def as_messages(items: Sequence[Item]) -> list[Message]:
    """Merges consecutive reasoning, text and calls of an assistant into one message; omits incomplete calls.

    Raises ParameterError if nothing is left.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for item in _as_functions(approvals_as_calls(items)):
        kind = item["type"]
        if kind == "function_call_output":
            call = item["call_id"]
            content = _parts(item["output"])
            messages.append({"role": "tool", "tool_call_id": call, "name": names[call], "content": content})
        elif kind == "reasoning":
            if thought := _reasoning_text(item):
                last = _assistant(messages, kind)
                last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), thought)))
        elif kind == "function_call":
            if item["status"] != "incomplete":
                names[item["call_id"]] = item["name"]
                _assistant(messages, kind).setdefault("tool_calls", []).append(_call(item))
        elif item["role"] == "assistant":
            _assistant(messages, kind)["content"] += _parts(item["content"])
        else:
            messages.append({"role": item["role"], "content": _parts(item["content"])})
    if not messages:
        raise ParameterError("input", "says nothing: its thoughts are empty, or its calls incomplete; give a message")
    return [_drop_empty_content(message) for message in messages]


def _as_functions(items: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Converts each mcp_call to a function_call and a function_call_output."""
    for item in items:
        if item["type"] in ("mcp_list_tools", *PASSED_OVER):
            continue
        if item["type"] != "mcp_call":
            yield item
        elif item["status"] in ("completed", "failed"):
            yield {**item, "type": "function_call", "call_id": item["id"]}
            yield {"type": "function_call_output", "call_id": item["id"], "output": call_result(item)}


def call_result(item: Mapping[str, Any]) -> str:
    """Returns the text of an mcp_call's result or error, for the model."""
    error = item.get("error")
    if error is None:
        return item.get("output") or ""
    content = error.get("content") if isinstance(error, Mapping) else None
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return error if isinstance(error, str) else str(error.get("message", "the call failed"))


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Returns the reasoning text, or its summary if there is no text."""
    return "\n".join(part["text"] for part in item["content"] or item["summary"])


def _assistant(messages: list[Message], kind: str) -> Message:
    """Returns the item's assistant message: the last, or a new one after text without calls (unless it is a call)."""
    last = messages[-1] if messages else {}
    begins = last.get("role") != "assistant" or (last["content"] and "tool_calls" not in last)
    if begins and not (kind == "function_call" and last.get("role") == "assistant"):
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _drop_empty_content(message: Message) -> Message:
    """Removes empty content from a message that only has tool calls, as in Chat Completions."""
    if message["content"] or "tool_calls" not in message:
        return message
    return {key: value for key, value in message.items() if key != "content"}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": arguments_of(item["arguments"])}
    return {"id": item["call_id"], "type": "function", "function": function}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> Any:
    if part["type"] in MEDIA_PARTS:
        return as_media(part)
    return {"type": "text", "text": part["refusal" if part["type"] == "refusal" else "text"]}
