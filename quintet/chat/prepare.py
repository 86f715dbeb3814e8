"""Prepares a conversation for the engine: its prompt, sampling params, grammar and output format.

Each API translates its requests into ChatInput; chat templates, tools, reasoning and structured output meet only here.
"""

import copy
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.chat.lazy_template import template_variables
from quintet.chat.media.parts import MediaCollector, is_media
from quintet.chat.media.process import process_media, run_media_inline
from quintet.chat.messages import ChatOptions, render_chat
from quintet.chat.output_parser import OutputFormat, Parsers, marker_ids
from quintet.chat.prompts import Prompt, PromptLimit, parse_prompt
from quintet.chat.reasoning_effort import ReasoningSettings, may_reason, reasoning_variables
from quintet.chat.reasoning_tokens import UNMARKED, ReasoningMarkers
from quintet.chat.tool_choice import (
    ToolChoice,
    forced_grammar,
    special_token_ids,
    strict_grammar,
    structured_output_grammar,
)
from quintet.media.input import MediaInput
from quintet.parsers import ReasoningParser, Tool
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from quintet.structured_output.grammar_source import GrammarWriter
from quintet.tokenizers.tokenizer import Tokenizer

# characters, token ids or bytes of JSON; below that a worker thread costs more than the work
MAX_INLINE_CHARACTERS = 2000
INVALID = "invalid_value"  # code of errors


@dataclass(frozen=True)
class FieldNames:
    """Names that a chat's fields have in its API, for errors."""

    messages: str = "messages"
    format: str = "structured_outputs"
    tools: Mapping[str, int] = field(default_factory=dict)  # tool -> its index, where errors name the index
    remedy: str = PromptLimit.remedy  # against a prompt that is too long


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """One conversation with its options. Messages and tools have the form that chat templates read."""

    messages: Sequence[Any]
    params: SamplingParams | None = None  # structured_outputs included; None: only the prompt is wanted, of any length
    options: ChatOptions = ChatOptions()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True  # False: one call at most
    thinking: ReasoningSettings = ReasoningSettings()
    media_io_kwargs: Mapping[str, Any] | None = None  # options of decoding, by kind of media
    mm_processor_kwargs: Mapping[str, Any] | None = None  # options of the model's processor of media
    add_special_tokens: bool = False
    cache_salt: str | None = None
    size: int = 0  # upper bound of the characters; decides if a worker thread renders
    names: FieldNames = FieldNames()


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that is ready for the engine."""

    prompt: Prompt
    params: SamplingParams
    grammar: str  # of params.structured_outputs; "" without
    output_format: OutputFormat


async def run_inline(size: int, work: Callable[[], Any], parameter: str) -> Any:
    """Runs work on a text of `size` characters. A server's worker names `parameter` in errors that have no field."""
    return work()


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """Model that conversations are prepared for, and the caller's settings."""

    tokenizer: Tokenizer
    parsers: Parsers
    grammars: GrammarWriter
    reasoning: ReasoningMarkers | str = UNMARKED
    chat_template: str | None = None  # Jinja text instead of the tokenizer's
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # defaults, where the template reads them
    reasoning_effort_map: Mapping[str, str] = field(default_factory=dict)  # effort of a request -> of the template
    tool_strict_level: str = "auto"  # function: the form of calls is enforced; parameter: all tools are strict
    max_model_len: int | None = None  # None: the engine checks and truncates prompts
    vocab_size: int = 0
    worker: Callable[[int, Callable[[], Any], str], Awaitable[Any]] = run_inline
    media: MediaInput | None = None  # of images, video and audio; None: the model takes text alone
    media_worker: Callable[[Callable[[], Any]], Awaitable[Any]] = run_media_inline  # runs what fetches and decodes


async def prepare(chat: ChatInput, model: ChatModel, prompt: Prompt | None = None) -> PreparedChat:
    """Prepares a conversation; its params do not change. `prompt`: the conversation, if it is rendered already.

    Raises ParameterError for a field that cannot be served.
    """
    params = chat.params
    assert params is not None
    form = params.structured_outputs
    if chat.tool_choice.forced and form is not None and chat.names.format == "structured_outputs":
        why = "asks for calls, and structured_outputs for another answer; leave one of them out"
        raise ParameterError("tool_choice", why, INVALID)
    grammar = await compiled_grammar(model.grammars, form, chat.names.format)
    thinks = await _may_reason(chat, model)
    if prompt is None:
        prompt = await render(chat, model)
    output_format = _output_format(chat, model, prompt, thinks)
    output_format, written = await _with_grammar(chat, model, output_format, grammar)
    markers = marker_ids(output_format, model.tokenizer)
    if markers or written != grammar or model.max_model_len is not None:
        params = copy.copy(params)
        params.keep_special_tokens = [*params.keep_special_tokens, *markers]
    if written != grammar:
        params.structured_outputs = _grammar_params(written)
    if model.max_model_len is not None:
        params.truncate_prompt_tokens = None  # already applied
    return PreparedChat(prompt, params, written, output_format)


async def render(chat: ChatInput, model: ChatModel) -> Prompt:
    """Renders a conversation to a prompt. With params, it is truncated and its length is checked."""
    params, names = chat.params, chat.names
    limit, media = None, MediaCollector(None if model.media is None else model.media.info)
    if params is not None and model.max_model_len is not None:
        limit = PromptLimit(model.max_model_len, names.messages, names.remedy)

    def work() -> Prompt:
        if limit is not None and params is not None and params.truncate_prompt_tokens is None:
            limit.check_text(_text_size(chat.messages), model.tokenizer)
        prompt = render_chat(model.tokenizer, chat.messages, _options(chat, model), media)
        ids = prompt.token_ids
        if media.parts:
            return prompt
        if chat.add_special_tokens:
            ids = model.tokenizer.encode(prompt.text or "", add_special_tokens=True)
        if params is None or limit is None:
            return Prompt(ids, prompt.text, chat.cache_salt)
        ids = limit.fit(ids, params, "the conversation")
        keyed = {"prompt": prompt.text, "prompt_token_ids": ids, "cache_salt": chat.cache_salt}
        return parse_prompt(keyed, model.tokenizer, model.vocab_size)

    slow = chat.options.chat_template is not None or chat.options.tools
    size = chat.size if model.media is None else min(chat.size, _text_size(chat.messages) + MAX_INLINE_CHARACTERS)
    prompt: Prompt = await model.worker(max(size, MAX_INLINE_CHARACTERS) if slow else size, work, names.messages)
    if not media.parts:
        return prompt
    assert model.media is not None
    options = chat.media_io_kwargs, chat.mm_processor_kwargs
    process = functools.partial(process_media, model.media, prompt.text or "", media.parts, options, names.messages)
    made: Prompt = await model.media_worker(process)
    if limit is not None and params is not None:
        limit.fit_whole(made.token_ids, params, "the conversation")
    return replace(made, cache_salt=chat.cache_salt)


async def compiled_grammar(grammars: GrammarWriter, wanted: StructuredOutputsParams | None, parameter: str) -> str:
    """Returns the grammar of a field; "" without. Raises ParameterError for that field."""
    try:
        return "" if wanted is None else await grammars.grammar(wanted)
    except ParameterError as error:
        raise ParameterError(parameter, _reason(error), INVALID) from None


@functools.lru_cache(maxsize=4)  # conversations with the same tools have the same grammar
def _grammar_params(grammar: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=grammar)


def _reason(error: ParameterError) -> str:
    return str(error).removeprefix(f"{error.parameter} ")


def _template(chat: ChatInput, model: ChatModel) -> str:
    """Returns the template's text to search for variables: of the tokenizer, all templates."""
    return str(chat.options.chat_template or model.chat_template or model.tokenizer.templates)


def _options(chat: ChatInput, model: ChatModel) -> ChatOptions:
    """Returns the template's options, with the variables of reasoning and the defaults that it reads."""
    template, given = _template(chat, model), chat.options
    known = template_variables(template)
    effort = chat.thinking.effort
    options = {
        **{name: value for name, value in model.chat_template_kwargs.items() if name in known},
        **reasoning_variables(template, chat.thinking.enabled, model.reasoning_effort_map.get(effort or "", effort)),
        **(given.chat_template_kwargs or {}),
    }
    return replace(
        given, chat_template=given.chat_template or model.chat_template, chat_template_kwargs=options or None
    )


async def _may_reason(chat: ChatInput, model: ChatModel) -> bool:
    def work() -> bool:
        return may_reason(_template(chat, model), _options(chat, model).chat_template_kwargs)

    own = chat.options.chat_template is not None  # it is tried, and may take its time
    return bool(await model.worker(max(chat.size, MAX_INLINE_CHARACTERS) if own else 0, work, "chat_template"))


def _output_format(chat: ChatInput, model: ChatModel, prompt: Prompt, thinks: bool) -> OutputFormat:
    assert chat.params is not None
    forced, shaped = chat.tool_choice.forced, chat.params.structured_outputs is not None
    reasoning, inside = _reasoning(chat, model, prompt.text or "", thinks)
    tool = None if chat.tool_choice.mode == "none" else model.parsers.tool
    if shaped and not forced:
        tool, reasoning = tool and tool.for_structured_output(), reasoning and reasoning.for_structured_output()
    output_format = OutputFormat(
        tool,
        reasoning,
        chat.tool_choice.tools,
        inside,
        parallel=chat.parallel_tool_calls,
        earlier_calls=sum(len(each.get("tool_calls") or ()) for each in chat.messages),
        include_reasoning=chat.thinking.visible,
        late_end=not (forced or shaped) and chat.params.thinking_token_budget not in (None, -1),
    )
    marks = model.reasoning
    if reasoning is None or isinstance(marks, str):
        return output_format
    return replace(
        output_format, reasoning_markers=marks.marks, open_reasoning_tokens=marks.open_tokens(prompt.token_ids)
    )


def _reasoning(chat: ChatInput, model: ChatModel, prompt: str, thinks: bool) -> tuple[ReasoningParser | None, bool]:
    """Returns the reasoning parser, and whether an answer begins inside reasoning. None if a grammar decides the answer
    from its first token on."""
    assert chat.params is not None
    reasoning, continues = model.parsers.reasoning, chat.options.continue_final_message
    held = chat.params.structured_outputs is not None or chat.tool_choice.forced
    if reasoning is None or (held and model.grammars.config.enable_in_reasoning):
        return None, False
    inside = reasoning.begins_inside(prompt, continues)
    over = not thinks or continues or reasoning.ends_reasoning(prompt)
    return (None, False) if held and over and not inside else (reasoning, inside)


async def _with_grammar(
    chat: ChatInput, model: ChatModel, output_format: OutputFormat, grammar: str
) -> tuple[OutputFormat, str]:
    """Returns the output format and the grammar of the answers: that of required calls, the given one of a structured
    output, or that of an answer with optional strict calls; after the reasoning, if the model may think."""
    special = special_token_ids(model.tokenizer)
    if chat.tool_choice.forced:  # a structured output has no effect: the answer has only calls
        calls, parser = forced_grammar(chat.tool_choice, output_format, special)
        return replace(output_format, tool=parser), await _tool_call_grammar(chat, model, calls)
    if grammar:
        output_format, first = structured_output_grammar(output_format, special)
        return output_format, await _grammar_after(chat, model, grammar, output_format, first) if first else grammar
    calls = strict_grammar(chat.tool_choice, output_format, special, model.tool_strict_level)
    return output_format, await _tool_call_grammar(chat, model, calls) if calls else ""


async def _tool_call_grammar(chat: ChatInput, model: ChatModel, calls: str) -> str:
    try:
        return await compiled_grammar(model.grammars, _grammar_params(calls), "tools")
    except ParameterError as error:
        raise await _tool_error(chat, model, error) from None


async def _grammar_after(
    chat: ChatInput, model: ChatModel, grammar: str, output_format: OutputFormat, first: str
) -> str:
    """Combines the grammar of a structured output with calls. It alone compiles; if the combination does not, only the
    schemas of strict tools are enforced."""
    loose = tuple(each if each.strict else Tool(each.name) for each in output_format.tools)
    try:
        return await model.grammars.grammar_after(grammar, first)
    except ParameterError:
        first = structured_output_grammar(replace(output_format, tools=loose), special_token_ids(model.tokenizer))[1]
    try:
        return await model.grammars.grammar_after(grammar, first)
    except ParameterError as error:
        name = chat.names.format if output_format.tool is None else "tools"
        beside = ParameterError(name, f"beside a shape {_reason(error)}", INVALID)
        raise (beside if output_format.tool is None else await _tool_error(chat, model, beside)) from None


async def _tool_error(chat: ChatInput, model: ChatModel, error: ParameterError) -> ParameterError:
    """Returns the error of the first tool with parameters that do not compile; `error` if all compile alone."""
    for tool in chat.tool_choice.tools:
        try:
            await compiled_grammar(model.grammars, StructuredOutputsParams(json=dict(tool.parameters)), "tools")
        except ParameterError as better:
            why, place = _reason(better), chat.names.tools.get(tool.name)
            if place is not None:
                return ParameterError(f"tools[{place}].parameters", why, INVALID)
            return ParameterError("tools", f"have an error: parameters of {tool.name[:80]!r} {why}", INVALID)
    return error


def _text_size(value: Any) -> int:
    """Counts characters of all strings in a nested value; images, video and audio count nothing."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 0 if is_media(value) else sum(_text_size(each) for each in value.values())
    return sum(_text_size(each) for each in value) if isinstance(value, list) else 0
