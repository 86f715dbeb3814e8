"""One call of chat(): its prompts, what they ask of the engine, and what their answers are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quintet.chat.messages import ChatOptions, load_chat_template, render_chats
from quintet.chat.output_parser import OutputFormat, OutputParser, Parsers, marker_ids
from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_effort import may_think
from quintet.chat.tool_choice import (
    AnswerOptions,
    ToolChoice,
    around,
    forced_grammar,
    kept_apart,
    listening,
    read_tools,
    strict_grammar,
)
from quintet.common.suggestions import refuse_unknown
from quintet.config import StructuredOutputsConfig
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers.message_builder import MessageBuilder
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from quintet.structured_output.grammar_source import behind, grammar_text
from quintet.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallOptions:
    """Options of chat() for tool calls and reasoning, besides its template."""

    tool_choice: Any = None  # "auto" (where there are tools), "none", "required", or one by name, as in OpenAI's API
    parallel_tool_calls: bool | None = True  # False: one call at most
    tool_call_parser: str | None = None  # by name, or "none"; the one that fits the template if not given
    reasoning_parser: str | None = None


class ChatCall:
    """The conversations of one call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        messages: Any,
        options: Mapping[str, Any],
        config: StructuredOutputsConfig,
    ) -> None:
        """`family` is the model's type; `options` are the fields of ChatOptions and CallOptions.

        ValueError says what is wrong with a message or an option.
        """
        ours, templates = ([each.name for each in fields(cls)] for cls in (CallOptions, ChatOptions))
        refuse_unknown("chat option", options, [*templates, *ours])
        given = {name: value for name, value in options.items() if name in templates}
        self._options = CallOptions(**{name: value for name, value in options.items() if name in ours})
        self._options = replace(
            self._options, reasoning_parser=self._options.reasoning_parser or config.reasoning_parser
        )
        self._config = config
        if given.get("chat_template") is not None:
            given["chat_template"] = load_chat_template(given["chat_template"])
        self._wanted: ToolChoice = read_tools(given.get("tools"), self._options.tool_choice)
        self._parsers = Parsers.of(self._options, tokenizer, given.get("chat_template"), family)
        self._tokenizer = tokenizer
        template = given.get("chat_template") or tokenizer.templates
        self._thinks = may_think(template, given.get("chat_template_kwargs"))
        self.prompts: list[Prompt] = render_chats(tokenizer, messages, **given)
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        continues = bool(given.get("continue_final_message"))
        self._manners = [self._manner(each, continues) for each in conversations]

    def fit(self, params: Sequence[SamplingParams]) -> tuple[list[SamplingParams], list["AnswerParser"]]:
        """One SamplingParams for each prompt -> what they become, and who takes the answers apart; none is changed."""
        fitted, hearings, made = [], [], dict[tuple[int, tuple[int, ...], str], SamplingParams]()
        for prompt, manner, each in zip(self.prompts, self._manners, params, strict=True):
            shaped = each.structured_outputs is not None
            how = listening(self._parsers, self._wanted, manner, prompt.text or "", shaped)
            how, grammar = self._forced(how, shaped)
            if shaped:
                how, grammar = self._around(how, each)
            key = (id(each), tuple(marker_ids(how, self._tokenizer)), grammar)  # those that are alike stay one object
            if key not in made:
                made[key] = _changed(each, *key[1:])
            fitted.append(made[key])
            hearings.append(AnswerParser(how))
        return fitted, hearings

    def _manner(self, messages: Sequence[Mapping[str, Any]], continues: bool) -> AnswerOptions:
        earlier = sum(len(each.get("tool_calls") or ()) for each in messages)
        parallel, within = self._options.parallel_tool_calls is not False, self._config.enable_in_reasoning
        return AnswerOptions(parallel, earlier, continues=continues, thinks=self._thinks, within=within)

    def _around(self, how: OutputFormat, params: SamplingParams) -> tuple[OutputFormat, str]:
        """Returns the settings and the grammar of a structured output with reasoning or calls around it; "" without."""
        assert params.structured_outputs is not None
        how, first = around(how, kept_apart(self._tokenizer))
        return how, behind(grammar_text(params.structured_outputs, self._config), first) if first else ""

    def _forced(self, how: OutputFormat, shaped: bool) -> tuple[OutputFormat, str]:
        """Returns the settings with the parser of required calls, and their grammar, or that of strict tools' optional
        calls; empty if there is none."""
        if not self._wanted.forced:
            return how, "" if shaped else strict_grammar(self._wanted, how, kept_apart(self._tokenizer))
        if shaped:
            raise ParameterError(
                "tool_choice", "asks for calls, and structured_outputs for another answer; leave one of them out"
            )
        calls, parser = forced_grammar(self._wanted, how, kept_apart(self._tokenizer))
        return replace(how, tool=parser), calls


def _changed(params: SamplingParams, markers: Sequence[int], grammar: str) -> SamplingParams:
    if not (markers or grammar):
        return params
    changed = params.clone()
    changed.keep_special_tokens = [*params.keep_special_tokens, *markers]
    if grammar:
        changed.structured_outputs = StructuredOutputsParams(grammar=grammar)
    return changed


class AnswerParser:
    """Takes the answers to one request apart as they come."""

    def __init__(self, how: OutputFormat) -> None:
        self._how = how
        self._heard: dict[int, tuple[OutputParser, MessageBuilder]] = {}  # by completion
        self._sizes: dict[int, int] = {}  # characters that were heard

    def take(self, output: RequestOutput, delta: bool = False) -> RequestOutput:
        """Fills the output with the parsed parts of its texts. delta: the texts are the new part, else all so far."""
        for each in output.outputs:
            size = 0 if delta else self._sizes.get(each.index, 0)
            self._sizes[each.index] = len(each.text)
            self._fill(each, each.text[size:], delta)
        return output

    def _fill(self, completion: CompletionOutput, new: str, delta: bool) -> None:
        speech, heard = self._heard.setdefault(completion.index, (OutputParser(self._how), MessageBuilder()))
        ended = completion.finish_reason is not None
        completion.events = speech.hear(new, ended)
        reasoning, content = (len(heard.reasoning), len(heard.content)) if delta else (0, 0)
        heard.take(completion.events)
        completion.reasoning, completion.content = heard.reasoning[reasoning:], heard.content[content:]
        completion.tool_calls = list(heard.calls)
        completion.message = heard.message() if ended else None
