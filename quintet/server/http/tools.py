"""Whether and how this server tells calls in the answers to one request."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quintet.engine.prompts import Prompt
from quintet.engine.speech import Listening, marker_ids
from quintet.engine.tools import Manner, Wanted, around, forced_grammar, kept_apart, listening, strict_grammar
from quintet.parsers import Tool
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.errors import ApiError
from quintet.server.http.prompts import need_tokenizer
from quintet.server.http.sampling import refuse
from quintet.server.http.service import Service
from quintet.server.http.shape import shape


def check_tools(service: Service, wanted: Wanted) -> None:
    """Whether this server can tell calls in the model's answers. Raises ApiError 400."""
    if wanted.mode == "auto" and service.parsers.tool is None:
        raise refuse(
            "tools", "may be called, and nobody knows how this model writes calls: start the server with "
            '--tool-call-parser NAME, or set tool_choice to "required" or "none"',
        )  # fmt: skip
    if wanted.mode == "auto" and not service.settings.enable_auto_tool_choice:
        raise refuse("tool_choice", "must be none or required here: --enable-auto-tool-choice is off")


async def listen(
    service: Service, params: SamplingParams, wanted: Wanted, prompt: Prompt, grammar: str, manner: Manner
) -> tuple[Listening, str]:
    """How the answers are taken apart, and their grammar: the one that is given, that of the calls that must come, or
    that of an answer in which strict tools may be called; behind what the model thinks, if it may. Sets what params
    need for that.
    """
    if wanted.forced:
        grammar = ""  # of text, which there is none of beside calls
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


async def _held(service: Service, params: SamplingParams, calls: str, tools: Sequence[Tool]) -> str:
    """The grammar of calls, which compiles; else the error names the first tool whose parameters are the reason."""
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


async def _behind(service: Service, grammar: str, first: str, how: Listening, special: Mapping[str, int]) -> str:
    """The shape compiles by itself: where the whole does not, it is for the tools' schemas, which hold for strict tools
    alone then."""
    loose = tuple(each if each.strict else Tool(each.name) for each in how.tools)
    said = ""
    for written in (first, around(replace(how, tools=loose), special)[1]):
        try:
            return await service.backend.shapes.behind(grammar, written)
        except ParameterError as error:
            said = str(error).removeprefix("structured_outputs ")
    raise refuse("response_format" if how.tool is None else "tools", f"beside a shape {said}")
