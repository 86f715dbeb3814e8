"""Tools of a request: which there are, whether one of them must be called, and how the answer is parsed."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from quintet.chat.output_parser import OutputFormat
from quintet.chat.validation import flag_of, kind_of, object_of, one_of
from quintet.common.unknown_fields import drop_unknown
from quintet.parsers import TOOL_PARSERS, RequiredCalls, Tool, ToolParser
from quintet.sampling_params import ParameterError
from quintet.structured_output.json_schema import supported_schema
from quintet.tokenizers.tokenizer import Tokenizer

MAX_TOOLS = 1024  # OpenAI takes 128
MAX_NAME = 256
_MODES = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Tools and tool choice of one request."""

    tools: tuple[Tool, ...] = ()
    mode: str = "none"  # or auto, required
    named: str | None = None  # the one that must be called; mode is required then

    @property
    def forced(self) -> bool:
        return self.mode == "required"


def read_tools(tools: Any, choice: Any) -> ToolChoice:
    """Reads a chat's `tools` and `tool_choice`. Raises ParameterError that names the place."""
    known = distinct(_tool(each, f"tools[{place}]") for place, each in enumerate(tools or ()))
    return _chosen(known, choice) if isinstance(choice, dict) else of_mode(known, choice)


def distinct(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Raises ParameterError if two have one name."""
    known = tuple(tools)
    if len({each.name for each in known}) < len(known):
        raise ParameterError("tools", "has a name twice; give each tool its own")
    return known


def of_mode(known: tuple[Tool, ...], choice: Any) -> ToolChoice:
    """Reads a `tool_choice` that is a word, or not given."""
    mode = ("auto" if known else "none") if choice is None else one_of(choice, "tool_choice", _MODES)
    if mode == "required" and not known:
        raise ParameterError("tool_choice", "is required, and there are no tools; give some")
    return ToolChoice(known, mode if known else "none")


def allowed_tools(
    known: tuple[Tool, ...], given: Mapping[str, Any], where: str, name: Callable[[Any, str, Collection[str]], str]
) -> ToolChoice:
    """Some of the tools; `name` reads which tool an entry means."""
    mode = one_of(given.get("mode"), f"{where}.mode", ("auto", "required"))
    tools = given.get("tools")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ParameterError(f"{where}.tools", f"must be a list of 1 to {MAX_TOOLS} tools")
    there = {each.name for each in known}
    names = {name(each, f"{where}.tools[{place}]", there) for place, each in enumerate(tools)}
    return ToolChoice(tuple(each for each in known if each.name in names), mode)


def name_of(given: Any, where: str, there: Collection[str]) -> str:
    """Reads {"name": ...}: the name of one of the tools `there`."""
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or name not in there:
        raise ParameterError(f"{where}.name", f"must name one of the tools, not {str(name)[:80]!r}")
    return name


def tool_of(function: Mapping[str, Any], where: str) -> Tool:
    """Reads a tool {"name": ..., "parameters": ..., "strict": ...}."""
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise ParameterError(f"{where}.name", f"must be text of 1 to {MAX_NAME} characters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ParameterError(f"{where}.parameters", f"must be a JSON schema, not {kind_of(parameters)}")
    strict = flag_of(function.get("strict"), f"{where}.strict")
    return Tool(name, parameters or {"type": "object", "properties": {}}, strict)


def _chosen(known: tuple[Tool, ...], choice: Mapping[str, Any]) -> ToolChoice:
    kind = one_of(choice.get("type"), "tool_choice.type", ("function", "allowed_tools"))
    if kind == "allowed_tools":
        inner = object_of(choice.get(kind), "tool_choice.allowed_tools", ("mode", "tools"))
        return allowed_tools(known, inner, "tool_choice.allowed_tools", _name)
    return ToolChoice(known, "required", _name(choice, "tool_choice", {each.name for each in known}))


def _name(given: Any, where: str, there: Collection[str]) -> str:
    """Reads the tool's name in {"type": "function", "function": {"name": ...}}."""
    return name_of(given.get("function") if isinstance(given, dict) else None, f"{where}.function", there)


def _tool(given: Any, where: str) -> Tool:
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object, not {kind_of(given)}")
    one_of(given.get("type"), f"{where}.type", ("function",))
    drop_unknown(given, ("type", "function"), where)
    at = f"{where}.function"
    return tool_of(object_of(given.get("function"), at, ("name", "description", "parameters", "strict")), at)


def forced_grammar(
    tool_choice: ToolChoice, output_format: OutputFormat, special: Mapping[str, int]
) -> tuple[str, ToolParser]:
    """The grammar of the calls that must be made, and who reads them: the model's own form, or else a list in JSON."""
    choice = RequiredCalls(
        tool_choice.named, output_format.parallel, output_format.reasoning, output_format.begins_in_reasoning
    )
    for parser in (output_format.tool, TOOL_PARSERS.get("json")):
        written = None if parser is None else parser.grammar(_supported_tools(tool_choice.tools), choice, special)
        if parser is not None and written is not None:
            return written, parser
    raise ParameterError(
        "tools", "have a schema that cannot be written as a grammar: it is nested too deep; simplify it"
    )


def _supported_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Returns the tools with schemas for a grammar; one nested too deep stays, and the grammar's maker refuses it."""

    def made(tool: Tool) -> Tool:
        try:
            return replace(tool, parameters=supported_schema(dict(tool.parameters)))
        except RecursionError:
            return tool

    return tuple(made(tool) for tool in tools)


def strict_grammar(
    tool_choice: ToolChoice, output_format: OutputFormat, special: Mapping[str, int], level: str = "auto"
) -> str:
    """The grammar of an answer that may call, if a tool is strict; empty where the model's form has none. `level`:
    function enforces the form of calls without strict tools too, parameter takes all tools as strict."""
    tools = tool_choice.tools
    if level == "parameter":
        tools = tuple(replace(each, strict=True) for each in tools)
    held = any(each.strict for each in tools) or (tools and level == "function")
    if tool_choice.mode != "auto" or output_format.tool is None or not held:
        return ""
    choice = RequiredCalls(None, output_format.parallel, output_format.reasoning, output_format.begins_in_reasoning)
    return output_format.tool.optional_call_grammar(_supported_tools(tools), choice, special) or ""


@functools.lru_cache(maxsize=4)  # some have thousands of added tokens
def special_token_ids(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The tokens that llguidance does not take for text -> their ids."""
    added = tokenizer.added.items()
    return {text: i for text, i in added if i in tokenizer.special_ids or (text[:1] == "<" and text[-1:] == ">")}


def structured_output_grammar(output_format: OutputFormat, special: Mapping[str, int]) -> tuple[OutputFormat, str]:
    """Returns the grammar around a structured output, which it calls @answer: reasoning before it, or calls in its
    place. Empty if an answer is @answer and nothing else. Calls are not looked for if the grammar cannot have them."""
    if output_format.tool is not None:
        choice = RequiredCalls(
            None, output_format.parallel, output_format.reasoning, output_format.begins_in_reasoning, "@answer"
        )
        if (written := output_format.tool.grammar(_supported_tools(output_format.tools), choice, special)) is not None:
            return output_format, written
    output_format = replace(output_format, tool=None)
    return output_format, "" if output_format.reasoning is None else output_format.reasoning.grammar_with_reasoning(
        "@answer", output_format.begins_in_reasoning, special
    )
