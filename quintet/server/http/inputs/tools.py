"""Selects the output parsers and the tool call grammar for one request."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quintet.chat.output_parser import OutputFormat, marker_ids
from quintet.chat.prompts import Prompt
from quintet.chat.tool_choice import (
    AnswerOptions,
    ToolChoice,
    around,
    forced_grammar,
    kept_apart,
    listening,
    strict_grammar,
)
from quintet.parsers import Tool
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.prompts import need_tokenizer
from quintet.server.http.inputs.response_format import shape
from quintet.server.http.inputs.sampling_params import refuse


def check_tools(service: AppState, wanted: ToolChoice) -> None:
    """Raises ApiError 400 if this server cannot parse the tool calls that the request allows."""
    if wanted.mode == "auto" and service.parsers.tool is None:
        raise refuse(
            "tools", "may be called, but the tool call format of this model is unknown: start the server with "
            '--tool-call-parser NAME, or set tool_choice to "required" or "none"',
        )  # fmt: skip
    if wanted.mode == "auto" and not service.settings.enable_auto_tool_choice:
        raise refuse("tool_choice", "must be none or required here: --enable-auto-tool-choice is off")


async def listen(
    service: AppState, params: SamplingParams, wanted: ToolChoice, prompt: Prompt, grammar: str, manner: AnswerOptions
) -> tuple[OutputFormat, str]:
    """Returns the output format and the grammar of the answers: the given one, that of required calls, or that of an
    answer with optional strict calls; after the reasoning, if the model may think. Sets structured_outputs and
    keep_special_tokens in params.
    """
    if wanted.forced:
        grammar = ""  # a text grammar has no effect: the answer has only calls
    manner = manner._replace(within=service.backend.shapes.config.enable_in_reasoning)
    how = listening(service.parsers, wanted, manner, prompt.text or "", bool(grammar))
    special = kept_apart(need_tokenizer(service))
    if wanted.forced:
        calls, parser = forced_grammar(wanted, how, special)
        how, grammar = replace(how, tool=parser), await _held(service, params, calls, wanted.tools)
    elif grammar:
        how, first = around(how, special)
        grammar = await _behind(service, grammar, first, how, special) if first else grammar
    elif calls := strict_grammar(wanted, how, special):
        grammar = await _held(service, params, calls, wanted.tools)
    if how.reasoning is not None and not isinstance(thoughts := service.thoughts, str):
        how = replace(how, marks=thoughts.marks, begun=thoughts.begun(prompt.token_ids))
    params.keep_special_tokens = marker_ids(how, need_tokenizer(service))
    return how, grammar


async def _held(service: AppState, params: SamplingParams, calls: str, tools: Sequence[Tool]) -> str:
    """Compiles the grammar of calls; an error names the first tool with parameters that do not compile."""
    try:
        return await shape(service, params, {"grammar": calls}, "tools")
    except ApiError:
        for tool in tools:
            try:
                await shape(service, service.backend.default_params(), {"json": dict(tool.parameters)}, "tools")
            except ApiError as error:
                error.message = f"tools: parameters of {tool.name[:80]!r} {error.message.removeprefix('tools ')}"
                raise
        raise


async def _behind(service: AppState, grammar: str, first: str, how: OutputFormat, special: Mapping[str, int]) -> str:
    """Combines the response format's grammar with calls. The format alone compiles; if the combination does not, only
    the schemas of strict tools are enforced."""
    loose = tuple(each if each.strict else Tool(each.name) for each in how.tools)
    said = ""
    for written in (first, around(replace(how, tools=loose), special)[1]):
        try:
            return await service.backend.shapes.behind(grammar, written)
        except ParameterError as error:
            said = str(error).removeprefix("structured_outputs ")
    raise refuse("response_format" if how.tool is None else "tools", f"beside a shape {said}")
