"""Reads and checks the items of a request's input."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quintet.chat.validation import kind_of, list_of, object_of, one_of, refuse_fields, text_of
from quintet.sampling_params import ParameterError
from quintet.server.http.ids import new_id
from quintet.server.http.inputs.media_parts import MEDIA_PARTS, read_media_part
from quintet.server.http.responses.item_references import ItemReferences, is_reference
from quintet.server.http.responses.mcp.approvals import read_answer, read_request
from quintet.server.http.responses.protocol import Item
from quintet.server.http.responses.tool_items import (
    CLIENT_CALLS,
    CLIENT_OUTPUTS,
    PASSED_OVER,
    read_call,
    read_client_call,
    read_client_output,
    read_list,
    read_mcp_call,
    read_output,
    read_reasoning,
)

ROLES = ("user", "assistant", "system", "developer")
_ITEM_KEYS = ("type", "id", "role", "content", "status", "phase")
_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> where its text stands
_PART_KEYS = {
    "input_text": ("type", "text", "prompt_cache_breakpoint"),
    "output_text": ("type", "text", "annotations", "logprobs"),
    "refusal": ("type", "refusal"),
}
_REASONS = {
    "input_file": "files are not read here; give their text, or a picture as input_image",
    "compaction": "this server compacts no conversations",
    "compaction_trigger": "this server compacts no conversations",
}
_TOOL_SUFFIXES = ("_call", "_call_output", "_search_output", "_tools")


def read_input(given: Any, references: ItemReferences) -> list[Item]:
    """Converts text or a list of items to items in the form that the API returns. Raises ParameterError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = list_of(given, "input", "text, or a list of items that is not empty")
    places = [(item, f"input[{place}]") for place, item in enumerate(items)]
    return [references.item(item, where) if is_reference(item) else _read_item(item, where) for item, where in places]


def _read_item(item: Any, where: str) -> Item:
    if isinstance(item, dict) and "type" in item:
        kind = _check_type(item["type"], where, ("message", "item_reference", *_READERS))
        if kind in _READERS:
            return _READERS[kind](item, where)
    item = object_of(item, where, _ITEM_KEYS)
    role = one_of(item.get("role"), f"{where}.role", ROLES)
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    parts = list_of(content, f"{where}.content", "text, or a list of parts that is not empty")
    return {
        "id": f"msg_{new_id()}",
        "type": "message",
        "status": "completed",
        "role": role,
        "content": [_read_part(part, role, f"{where}.content[{place}]") for place, part in enumerate(parts)],
    }


def _read_part(part: Any, role: str, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ParameterError(where, f"must be an object with type and text, not {kind_of(part)}")
    kind = _check_type(part.get("type"), where, (*_PARTS, *MEDIA_PARTS))
    if kind in MEDIA_PARTS:
        return read_media_part(part, role, where)
    refuse_fields(part, _PART_KEYS[kind], where)
    if kind != "input_text" and role != "assistant":
        raise ParameterError(where, f"of type {kind} belongs to the role assistant, not to {role}; use input_text")
    text = text_of(part.get(_PARTS[kind]), f"{where}.{_PARTS[kind]}")
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    return _output_text(text) if role == "assistant" else {"type": kind, "text": text}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _read_function_output(item: Mapping[str, Any], where: str) -> Item:
    return read_output(item, where, lambda part, at: _read_part(part, "tool", at))


def _passed_over(item: Mapping[str, Any], where: str) -> Item:
    return {"id": f"{item['type'].split('_')[0]}_{new_id()}", "type": item["type"], "status": "completed"}


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "function_call": read_call,
    "function_call_output": _read_function_output,
    "reasoning": read_reasoning,
    "mcp_call": read_mcp_call,
    "mcp_list_tools": read_list,
    "mcp_approval_request": read_request,
    "mcp_approval_response": read_answer,
    **dict.fromkeys(PASSED_OVER, _passed_over),
    **dict.fromkeys(CLIENT_CALLS, read_client_call),
    **dict.fromkeys(CLIENT_OUTPUTS, read_client_output),
}


def _check_type(given: Any, where: str, known: Sequence[str]) -> str:
    """Returns the type if it is served; otherwise raises ParameterError with the reason or the nearest name."""
    kind = text_of(given, f"{where}.type")
    why = _REASONS.get(kind)
    if kind not in known and kind.endswith(_TOOL_SUFFIXES):
        why = "this server has no tools of that kind; give a function_call and its function_call_output"
    if why is not None:
        raise ParameterError(where, f"is of type {kind[:80]}, which is not served: {why}")
    return one_of(kind, f"{where}.type", known)
