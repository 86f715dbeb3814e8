"""Converts flat tools of the Responses API for chat templates and output parsers."""

from collections.abc import Collection, Mapping
from typing import Any

from quintet.chat.tool_choice import ToolChoice, allowed_tools, distinct, name_of, of_mode, tool_of
from quintet.chat.validation import kind_of, one_of, refuse_fields, text_of
from quintet.common.unknown_fields import report_unknown
from quintet.parsers import Tool
from quintet.sampling_params import ParameterError
from quintet.server.http.errors import ApiError

_FUNCTION = ("type", "name", "description", "parameters", "strict", "output_schema")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # fields of a function -> accepted no-op values
    "defer_loading": (None, False),
    "async": (None, False),
    "allowed_callers": (None, ["direct"]),
}
_OPENAI_ONLY = "it runs on OpenAI's servers; give a function, run it yourself, and send a function_call_output"
_BUILT_IN = {
    "mcp": "a tool of a tool server is named as a function here",
    "custom": "arguments are JSON here; give a function with one argument that is text",
    "namespace": "give its functions as tools of their own",
    "tool_search": "all tools are loaded at once; leave it out",
    "programmatic_tool_calling": "the model calls functions alone; leave it out",
    **dict.fromkeys(
        (
            "web_search",
            "web_search_preview",
            "file_search",
            "code_interpreter",
            "computer",
            "computer_use",
            "computer_use_preview",
            "image_generation",
            "local_shell",
            "shell",
            "apply_patch",
        ),
        _OPENAI_ONLY,
    ),
}


def read_tools(tools: Any, choice: Any) -> ToolChoice:
    """Reads `tools` and `tool_choice`. Raises ParameterError with the field."""
    known = distinct(_tool(each, f"tools[{place}]") for place, each in enumerate(tools or ()))
    if not isinstance(choice, dict):
        return of_mode(known, choice)
    kind = _check_type(choice.get("type"), "tool_choice.type", ("function", "allowed_tools"))
    if kind == "allowed_tools":
        refuse_fields(choice, ("type", "mode", "tools"), "tool_choice")
        return allowed_tools(known, choice, "tool_choice", _name)
    return ToolChoice(known, "required", _name(choice, "tool_choice", {each.name for each in known}))


def leaves_out(tool: Any, where: str) -> bool:
    """Returns whether the tool is of a kind that is not served, and is left out: a header of the answer then names it.
    With --strict-requests none is: it is refused with a reason where tools are read."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    try:
        return isinstance(kind, str) and _built_in(kind) is not None and report_unknown(where, [kind], ())
    except ApiError:
        return False


def response_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns the served tools for the response object: clients require each of these fields."""
    served = [each for each in tools or () if _built_in(each["type"]) in (None, "mcp")]
    return [each if each["type"] == "mcp" else {"parameters": None, "strict": None, **each} for each in served]


def nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Nests a tool as in Chat Completions, the form that templates read."""
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool(given: Any, where: str) -> Tool:
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object, not {kind_of(given)}")
    _check_type(given.get("type"), f"{where}.type", ("function",))
    if "name" not in given and "function" in given:
        raise ParameterError(f"{where}.function", "belongs to chats: here name and parameters stand beside the type")
    for name, harmless in _UNSUPPORTED.items():
        if given.get(name) not in harmless:
            raise ParameterError(f"{where}.{name}", "is not served here; leave it out")
    refuse_fields(given, (*_FUNCTION, *_UNSUPPORTED), where)
    if given.get("description") is not None:
        text_of(given["description"], f"{where}.description")
    return tool_of(given, where)


def _name(given: Any, where: str, there: Collection[str]) -> str:
    """Returns the name in {"type": "function", "name": ...}."""
    if isinstance(given, dict):
        _check_type(given.get("type"), f"{where}.type", ("function",))
        refuse_fields(given, ("type", "name"), where)
    return name_of(given, where, there)


def _built_in(kind: str) -> str | None:
    """Returns the name of a kind of tool that is no function, without the date that its version may have."""
    return next((name for name in _BUILT_IN if kind == name or kind.startswith(f"{name}_20")), None)


def _check_type(given: Any, where: str, known: Collection[str]) -> str:
    kind = text_of(given, where)
    built_in = _built_in(kind)
    if built_in is not None:
        raise ParameterError(where, f"{kind[:80]!r} is not served: {_BUILT_IN[built_in]}")
    return one_of(kind, where, known)
