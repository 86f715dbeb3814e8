"""Converts Anthropic's tools and tool_choice for chat templates and output parsers."""

from dataclasses import replace
from typing import Any

from quintet.chat.tool_choice import ToolChoice, distinct, tool_of
from quintet.chat.validation import kind_of, one_of, refuse_fields
from quintet.parsers import Tool
from quintet.sampling_params import ParameterError
from quintet.server.http.anthropic.request import MessageBody

_KEYS = (
    "name",
    "description",
    "input_schema",
    "type",
    "cache_control",
    "strict",
    "input_examples",
    "eager_input_streaming",
)
_CHOICES = ("auto", "any", "tool", "none")


def read_tools(body: MessageBody) -> ToolChoice:
    """Reads tools and tool_choice. Raises ParameterError with the field."""
    tools = distinct(_tool(each, f"tools[{place}]") for place, each in enumerate(body.tools or ()))
    names = [each.name for each in tools]
    choice = body.tool_choice or {"type": "auto"}
    refuse_fields(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    kind = one_of(choice.get("type"), "tool_choice.type", _CHOICES)
    if kind in ("any", "tool") and not tools:
        raise ParameterError("tool_choice", f"is {kind}, and there are no tools; give some")
    if kind == "tool" and choice.get("name") not in names:
        raise ParameterError("tool_choice.name", f"must name one of the tools, not {str(choice.get('name'))[:80]!r}")
    if not tools or kind in ("auto", "none"):
        return ToolChoice(tools, kind if tools else "none")
    return ToolChoice(tools, "required", choice["name"] if kind == "tool" else None)


def parallel(body: MessageBody) -> bool:
    return not (body.tool_choice or {}).get("disable_parallel_tool_use")


def for_template(body: MessageBody) -> list[dict[str, Any]]:
    """Returns the tools in OpenAI's format, which templates read."""
    return [
        {"type": "function", "function": {
            "name": each["name"], "description": each.get("description") or "", "parameters": each["input_schema"],
        }}
        for each in body.tools or ()
    ]  # fmt: skip


def _tool(given: Any, where: str) -> Tool:
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object, not {kind_of(given)}")
    if given.get("type") not in (None, "custom"):
        raise ParameterError(f"{where}.type", f"{str(given['type'])[:80]!r} is not served; leave it out, or use custom")
    refuse_fields(given, _KEYS, where)
    schema = given.get("input_schema")
    if not isinstance(schema, dict):
        raise ParameterError(f"{where}.input_schema", f"must be a JSON schema, not {kind_of(schema)}")
    return replace(tool_of({**given, "parameters": {}}, where), parameters=schema)
