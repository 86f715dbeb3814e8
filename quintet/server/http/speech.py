"""What a model's answer is made of: thoughts, words and calls, told apart by the parsers that fit its template."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from quintet.engine.tokenizer import Tokenizer
from quintet.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    Splitter,
    Tool,
    ToolParser,
    detect,
    load_plugin,
)
from quintet.server.http.protocol.chat import AnswerMessage, CallPart, Delta, FunctionPart
from quintet.server.settings import ServerConfig

_TURN = 4096  # characters: at most some milliseconds


@dataclass(frozen=True)
class Parsers:
    """Of the model that is served; None where it has no such thing, or nobody knows how it writes it."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None

    @classmethod
    def of(cls, settings: ServerConfig, tokenizer: Tokenizer | None, template: str | None) -> "Parsers":
        """Those that the settings name, or those that fit the chat template."""
        own = tokenizer.chat_template if tokenizer is not None else None
        own = "\n".join(own.values()) if isinstance(own, dict) else own
        tool, reasoning = detect(template or own or "")
        if reasoning is None and tokenizer is not None and tokenizer.added.keys() >= {"<think>", "</think>"}:
            reasoning = "think"
        tool, reasoning = settings.tool_call_parser or tool, settings.reasoning_parser or reasoning
        return cls(
            None if tool in (None, "none") else TOOL_PARSERS.get(tool),
            None if reasoning in (None, "none") else REASONING_PARSERS.get(reasoning),
        )


def check_parsers(settings: ServerConfig) -> None:
    """Runs the operator's plug-ins. ValueError if one of them, or a parser that is named, is not there."""
    for plugin in (settings.tool_parser_plugin, settings.reasoning_parser_plugin):
        if plugin is not None:
            load_plugin(plugin)
    if settings.tool_call_parser not in (None, "none"):
        TOOL_PARSERS.get(settings.tool_call_parser)
    if settings.reasoning_parser not in (None, "none"):
        REASONING_PARSERS.get(settings.reasoning_parser)


@dataclass(frozen=True)
class Listening:
    """How one request's answers are taken apart."""

    tool: ToolParser | None = None  # None: calls are not looked for
    reasoning: ReasoningParser | None = None
    tools: Sequence[Tool] = ()
    inside: bool = False  # whether the prompt has begun a thought
    parallel: bool = True  # or the first call alone is told
    earlier: int = 0  # calls that the conversation has already
    tell_thoughts: bool = True

    @property
    def plain(self) -> bool:
        """Whether all of an answer is its content."""
        return self.tool is None and self.reasoning is None


@dataclass
class Speech:
    """One answer, as it comes."""

    listening: Listening
    calls: int = 0  # that it has made
    _splitter: Splitter = field(init=False)

    def __post_init__(self) -> None:
        to = self.listening
        self._splitter = Splitter(to.tool, to.reasoning, to.tools, to.inside)

    def delta(self, text: str, ended: bool) -> Delta:
        """What the next text of the answer, or its last, adds."""
        delta = self._take(Delta(), text, ended)
        if delta == Delta():
            delta.content = ""  # its text is held back, or of no kind that is told
        return delta

    async def message(self, text: str) -> AnswerMessage:
        """Of a whole answer; the event loop has its turns meanwhile."""
        delta = Delta()
        for start in range(0, len(text), _TURN):
            self._take(delta, text[start : start + _TURN], ended=False)
            await asyncio.sleep(0)
        self._take(delta, "", ended=True)
        calls = [] if delta.tool_calls is UNSET else delta.tool_calls
        content = None if delta.content is UNSET else delta.content or None
        thought = None if delta.reasoning is UNSET else delta.reasoning
        message = AnswerMessage(content if content is not None or calls or thought else "")
        if calls:
            message.tool_calls = _joined(calls)
        if thought is not None:
            message.reasoning = message.reasoning_content = thought
        return message

    def reason(self, finish_reason: str | None) -> str | None:
        """Why it ended, as clients are told: by its calls, if it has made any."""
        return "tool_calls" if finish_reason == "stop" and self.calls else finish_reason

    def _take(self, delta: Delta, text: str, ended: bool) -> Delta:
        for event in self._splitter.feed(text) + (self._splitter.finish() if ended else []):
            self._add(delta, event)
        return delta

    def _add(self, delta: Delta, event: Event) -> None:
        if isinstance(event, Content):
            delta.content = ("" if delta.content is UNSET else delta.content) + event.text
        elif isinstance(event, Reasoning):
            if self.listening.tell_thoughts:
                delta.reasoning = ("" if delta.reasoning is UNSET else delta.reasoning) + event.text
                delta.reasoning_content = delta.reasoning
        elif event.index == 0 or self.listening.parallel:
            part = self._part(event)
            if part is not None:
                delta.tool_calls = [*(() if delta.tool_calls is UNSET else delta.tool_calls), part]

    def _part(self, event: Event) -> CallPart | None:
        if isinstance(event, CallBegin):
            self.calls += 1
            parser = self.listening.tool
            assert parser is not None
            name = event.id or parser.call_id(event.name, self.listening.earlier + event.index)
            return CallPart(index=event.index, id=name, type="function", function=FunctionPart(event.name, ""))
        if isinstance(event, CallArguments):
            return CallPart(index=event.index, function=FunctionPart(arguments=event.text))
        return None


def _joined(parts: Sequence[CallPart]) -> list[CallPart]:
    """Each call once, without its index, as a whole answer has them."""
    calls: dict[int, CallPart] = {}
    for part in parts:
        assert not isinstance(part.index, type(UNSET))
        if part.index in calls:
            calls[part.index].function.arguments += part.function.arguments
        else:
            calls[part.index] = CallPart(id=part.id, type=part.type, function=part.function)
    return list(calls.values())
