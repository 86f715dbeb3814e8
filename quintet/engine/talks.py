"""One call of chat(): its prompts, what they ask of the engine, and what their answers are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quintet.engine.chat import ChatOptions, load_chat_template, render_chats
from quintet.engine.prompts import Prompt
from quintet.engine.speech import Listening, Parsers, Speech, needs_special
from quintet.engine.tokenizer import Tokenizer
from quintet.engine.tools import Manner, Wanted, forced_grammar, kept_apart, listening, read_tools, strict_grammar
from quintet.names import refuse_unknown
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning, ToolCall
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams


@dataclass(frozen=True)
class CallOptions:
    """What chat() is told of calls and thoughts, besides what its template is."""

    tool_choice: Any = None  # "auto" (where there are tools), "none", "required", or one by name, as in OpenAI's API
    parallel_tool_calls: bool | None = True  # False: one call at most
    tool_call_parser: str | None = None  # by name, or "none"; the one that fits the template if not given
    reasoning_parser: str | None = None


class Talks:
    """The conversations of one call."""

    def __init__(self, tokenizer: Tokenizer, family: str, messages: Any, options: Mapping[str, Any]) -> None:
        """`family` is the model's type; `options` are the fields of ChatOptions and CallOptions.

        ValueError says what is wrong with a message or an option.
        """
        ours, templates = ([each.name for each in fields(cls)] for cls in (CallOptions, ChatOptions))
        refuse_unknown("chat option", options, [*templates, *ours])
        given = {name: value for name, value in options.items() if name in templates}
        self._options = CallOptions(**{name: value for name, value in options.items() if name in ours})
        if given.get("chat_template") is not None:
            given["chat_template"] = load_chat_template(given["chat_template"])
        self._wanted: Wanted = read_tools(given.get("tools"), self._options.tool_choice)
        self._parsers = Parsers.of(self._options, tokenizer, given.get("chat_template"), family)
        self._tokenizer = tokenizer
        self.prompts: list[Prompt] = render_chats(tokenizer, messages, **given)
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        continues = bool(given.get("continue_final_message"))
        self._manners = [self._manner(each, continues) for each in conversations]

    def fit(self, params: Sequence[SamplingParams]) -> tuple[list[SamplingParams], list["Hearing"]]:
        """One SamplingParams for each prompt -> what they become, and who takes the answers apart; none is changed."""
        fitted, hearings, made = [], [], dict[tuple[int, bool, str], SamplingParams]()
        for prompt, manner, each in zip(self.prompts, self._manners, params, strict=True):
            shaped = each.structured_outputs is not None
            how = listening(self._parsers, self._wanted, manner, prompt.text or "", shaped)
            how, calls = self._forced(how, shaped)
            key = (id(each), needs_special(how, self._tokenizer), calls)  # those that are alike stay one object
            if key not in made:
                made[key] = _changed(each, *key[1:])
            fitted.append(made[key])
            hearings.append(Hearing(how))
        return fitted, hearings

    def _manner(self, messages: Sequence[Mapping[str, Any]], continues: bool) -> Manner:
        earlier = sum(len(each.get("tool_calls") or ()) for each in messages)
        return Manner(self._options.parallel_tool_calls is not False, earlier, continues=continues)

    def _forced(self, how: Listening, shaped: bool) -> tuple[Listening, str]:
        """With who reads the calls that must be made, and their grammar, or that of calls of strict tools that may
        be; empty where there is none."""
        if not self._wanted.forced:
            return how, "" if shaped else strict_grammar(self._wanted, how, kept_apart(self._tokenizer))
        if shaped:
            raise ParameterError(
                "tool_choice", "asks for calls, and structured_outputs for another answer; leave one of them out"
            )
        calls, parser = forced_grammar(self._wanted, how, kept_apart(self._tokenizer))
        return replace(how, tool=parser), calls


def _changed(params: SamplingParams, special: bool, calls: str) -> SamplingParams:
    if not (special or calls):
        return params
    changed = params.clone()
    if special:
        changed.skip_special_tokens = False
    if calls:
        changed.structured_outputs = StructuredOutputsParams(grammar=calls)
    return changed


@dataclass
class _Heard:
    """One completion so far."""

    speech: Speech
    size: int = 0  # characters that were heard
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case CallBegin(_, name, call_id):
                    self.calls.append(ToolCall(name, "", call_id, complete=False))
                case CallArguments(index, text):
                    self.calls[index] = replace(self.calls[index], arguments=self.calls[index].arguments + text)
                case CallEnd(index, complete):
                    self.calls[index] = replace(self.calls[index], complete=complete)


class Hearing:
    """Takes the answers to one request apart as they come."""

    def __init__(self, how: Listening) -> None:
        self._how = how
        self._heard: dict[int, _Heard] = {}  # by completion

    def take(self, output: RequestOutput, delta: bool = False) -> RequestOutput:
        """The same output, with what its texts are made of. delta: they are the new part, else all so far."""
        for each in output.outputs:
            heard = self._heard.setdefault(each.index, _Heard(Speech(self._how)))
            self._fill(each, heard, delta)
        return output

    @staticmethod
    def _fill(completion: CompletionOutput, heard: _Heard, delta: bool) -> None:
        new = completion.text if delta else completion.text[heard.size :]
        heard.size += len(new)
        completion.events = heard.speech.hear(new, completion.finish_reason is not None)
        reasoning, content = len(heard.reasoning), len(heard.content)
        heard.take(completion.events)
        completion.reasoning = heard.reasoning[reasoning if delta else 0 :]
        completion.content = heard.content[content if delta else 0 :]
        completion.tool_calls = list(heard.calls)
        if completion.finish_reason is not None:
            completion.message = message_of(heard.content, heard.reasoning, heard.calls)


def message_of(content: str, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    """An answer as a conversation has it. Calls that broke off are left out: nobody can answer them."""
    whole = [each for each in calls if each.complete]
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not whole else None}
    if reasoning:
        message["reasoning"] = reasoning
    if whole:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in whole
        ]
    return message
