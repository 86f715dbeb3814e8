"""Reads input items of calls, call outputs, mcp calls, tool lists and reasoning."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from quintet.chat.tool_choice import MAX_NAME
from quintet.chat.validation import kind_of, one_of, refuse_fields, text_of
from quintet.sampling_params import ParameterError
from quintet.server.http.ids import new_id
from quintet.server.http.responses.encrypted_content import unseal
from quintet.server.http.responses.protocol import Item

_CALL = ("type", "id", "call_id", "name", "arguments", "status", "caller", "async")
_OUTPUT = ("type", "id", "call_id", "output", "status", "caller", "name")
_REASONING = ("type", "id", "summary", "content", "encrypted_content", "status")
_MCP_CALL = ("type", "id", "server_label", "name", "arguments", "status", "output", "error", "approval_request_id")
_LIST = ("type", "id", "server_label", "tools", "error")
# Past calls of OpenAI's own tools: their results are in the answer's text, so the model does not see the items.
PASSED_OVER = ("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call",
               "tool_search_call", "tool_search_output")  # fmt: skip
# Past calls of tools that the client ran -> where the input of the call stands. The model sees them as functions.
CLIENT_CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
}
CLIENT_OUTPUTS = tuple(f"{kind}_output" for kind in CLIENT_CALLS)
_STATUS = ("in_progress", "completed", "incomplete")


def read_call(item: Mapping[str, Any], where: str) -> Item:
    """Reads a function_call; its arguments may be broken. Raises ParameterError, as the others do."""
    check_fields(item, where, _CALL)
    name, status = text_of(item.get("name"), f"{where}.name"), _status(item, where)
    if not 1 <= len(name) <= MAX_NAME:
        raise ParameterError(f"{where}.name", f"must be text of 1 to {MAX_NAME} characters")
    arguments = read_arguments(item, where)
    call_id = text_of(item.get("call_id"), f"{where}.call_id")
    return {
        "id": f"fc_{new_id()}",
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def read_client_call(item: Mapping[str, Any], where: str) -> Item:
    """Reads a call of a client's tool as a function_call; other fields than its input and name are ignored."""
    kind = item["type"]
    key = CLIENT_CALLS[kind]
    name = item.get("name") or kind.removesuffix("_call")
    arguments = msgspec.json.encode({key: item.get(key)}).decode()
    return read_call({"call_id": item.get("call_id"), "name": name, "arguments": arguments}, where)


def read_client_output(item: Mapping[str, Any], where: str) -> Item:
    """Reads the output of a client's tool; what is no text is written as JSON."""
    output = item.get("output")
    text = output if isinstance(output, str) else msgspec.json.encode(output).decode()
    call_id = item.get("call_id") or item.get("id")  # a local_shell_call_output has the call's id as its own
    return read_output({"call_id": call_id, "output": text}, where, lambda part, at: part)


def read_arguments(item: Mapping[str, Any], where: str) -> str:
    """Reads the text of arguments, of whatever form: it may have been cut off, or may not be there."""
    arguments = item.get("arguments")
    return "" if arguments is None else text_of(arguments, f"{where}.arguments")


def read_output(item: Mapping[str, Any], where: str, part: Callable[[Any, str], Any]) -> Item:
    """Reads a function_call_output. `part` reads one part of its content."""
    check_fields(item, where, _OUTPUT)
    output = item.get("output")
    if isinstance(output, list):
        output = [part(each, f"{where}.output[{place}]") for place, each in enumerate(output)]
    else:
        text_of(output, f"{where}.output")
    call_id = text_of(item.get("call_id"), f"{where}.call_id")
    return {
        "id": f"fco_{new_id()}",
        "type": "function_call_output",
        "status": _status(item, where),
        "call_id": call_id,
        "output": output,
    }


def read_reasoning(item: Mapping[str, Any], where: str) -> Item:
    """Clients may give the text back, its sealed form, or a summary."""
    check_fields(item, where, _REASONING)
    content = _texts(item, "content", "reasoning_text", where)
    summary = _texts(item, "summary", "summary_text", where)
    sealed = item.get("encrypted_content")
    if sealed is not None and not content:
        text = unseal(text_of(sealed, f"{where}.encrypted_content"), f"{where}.encrypted_content")
        content = [{"type": "reasoning_text", "text": text}]
    return {
        "id": f"rs_{new_id()}",
        "type": "reasoning",
        "status": _status(item, where),
        "summary": summary,
        "content": content,
        "encrypted_content": None,
    }


def read_mcp_call(item: Mapping[str, Any], where: str) -> Item:
    """Reads an mcp_call. Its output is what the client sends, and is not verified."""
    check_fields(item, where, _MCP_CALL)
    status = item.get("status")
    status = "completed" if status is None else one_of(status, f"{where}.status", (*_STATUS, "failed", "calling"))
    arguments = read_arguments(item, where)
    error = item.get("error")
    if not isinstance(error, dict | str | None):
        raise ParameterError(f"{where}.error", f"must be an object, not {kind_of(error)}")
    output, asked = item.get("output"), item.get("approval_request_id")
    return {
        "id": f"mcp_{new_id()}",
        "type": "mcp_call",
        "server_label": text_of(item.get("server_label"), f"{where}.server_label"),
        "name": text_of(item.get("name"), f"{where}.name"),
        "arguments": arguments,
        "status": status,
        "output": None if output is None else text_of(output, f"{where}.output"),
        "error": error,
        "approval_request_id": None if asked is None else text_of(asked, f"{where}.approval_request_id"),
    }


def read_list(item: Mapping[str, Any], where: str) -> Item:
    """Reads an mcp_list_tools item: the client knows the server's tools. The tools themselves are listed again."""
    check_fields(item, where, _LIST)
    label = text_of(item.get("server_label"), f"{where}.server_label")
    return {"id": f"mcpl_{new_id()}", "type": "mcp_list_tools", "server_label": label, "tools": [], "error": None}


def check_outputs(earlier: Iterable[Item], new: Iterable[Item]) -> None:
    """Checks that each function_call_output follows its complete function_call. `new`: items of the input."""
    calls = {item["call_id"] for item in earlier if _is_complete_call(item)}
    for place, item in enumerate(new):
        if _is_complete_call(item):
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise ParameterError(
                f"input[{place}].call_id",
                f"is {item['call_id'][:80]!r}, and no function_call before it has that id and is complete; give the "
                "call, or previous_response_id of the response that made it",
            )


def _is_complete_call(item: Item) -> bool:
    return bool(item["type"] == "function_call" and item["status"] != "incomplete")


def check_fields(item: Mapping[str, Any], where: str, known: tuple[str, ...]) -> None:
    """Refuses unknown fields, unless null: clients may send null for an absent field."""
    if item.get("namespace") is not None:
        raise ParameterError(f"{where}.namespace", "is not served: functions have names alone; leave it out")
    refuse_fields({name: value for name, value in item.items() if value is not None}, known, where)


def _status(item: Mapping[str, Any], where: str) -> str:
    status = item.get("status")
    return "completed" if status is None else one_of(status, f"{where}.status", _STATUS)


def check_arguments(arguments: str, where: str) -> None:
    """Checks that the text is a JSON object; empty text means no arguments."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError(where, f"must be the text of a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ParameterError(where, f"must be the text of a JSON object, not of {kind_of(value)}")


def _texts(item: Mapping[str, Any], key: str, kind: str, where: str) -> list[dict[str, Any]]:
    """Reads the parts of a reasoning item."""
    given = item.get(key)
    if given is None:
        return []
    if not isinstance(given, list):
        raise ParameterError(f"{where}.{key}", f"must be a list of parts of type {kind}, not {kind_of(given)}")
    made = []
    for place, part in enumerate(given):
        at = f"{where}.{key}[{place}]"
        if not isinstance(part, dict):
            raise ParameterError(at, f"must be an object with type and text, not {kind_of(part)}")
        refuse_fields(part, ("type", "text"), at)
        one_of(part.get("type"), f"{at}.type", (kind,))
        made.append({"type": kind, "text": text_of(part.get("text"), f"{at}.text")})
    return made
