"""Splits a model's answer into reasoning, content and tool calls, with the parsers that fit its chat template."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

from quintet.chat.reasoning_tokens import (
    NOT_REASONING,
    ReasoningCounter,
    ReasoningMarkerIds,
    find_parser,
    response_template,
)
from quintet.outputs import CompletionOutput
from quintet.parsers import (
    TOOL_PARSERS,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    StreamParser,
    Tool,
    ToolParser,
    detect,
)
from quintet.tokenizers.tokenizer import Tokenizer

MAX_LATE = 512  # characters of a streamed answer that wait for a second end of the reasoning


class ParserNames(Protocol):
    """Names of the wanted parsers: "none" is none; for None, the parsers that fit the model are used."""

    @property
    def tool_call_parser(self) -> str | None: ...

    @property
    def reasoning_parser(self) -> str | None: ...


@dataclass(frozen=True)
class Parsers:
    """Parsers of a model; None where it has no calls or reasoning, or writes them in an unknown format."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None

    @classmethod
    def select(
        cls, named: "ParserNames", tokenizer: Tokenizer | None, template: str | None, family: str = ""
    ) -> "Parsers":
        """Returns the named parsers, or those that fit the chat template and the model's family.

        ValueError if there is none of such a name.
        """
        own = "" if tokenizer is None else tokenizer.templates
        tool = named.tool_call_parser or detect(template or own, family)[0]
        return cls(
            None if tool in (None, "none") else TOOL_PARSERS.get(tool, response_template(tool, tokenizer)),
            find_parser(named.reasoning_parser, template or own, family, tokenizer),
        )


@dataclass(frozen=True)
class OutputFormat:
    """Settings to parse the answers of one request."""

    tool: ToolParser | None = None  # None: calls are not looked for
    reasoning: ReasoningParser | None = None
    tools: Sequence[Tool] = ()
    begins_in_reasoning: bool = False  # whether the prompt has begun a thought
    parallel: bool = True  # False: only the first call is returned
    earlier_calls: int = 0  # calls that the conversation has already
    include_reasoning: bool = True
    reasoning_markers: ReasoningMarkerIds | None = None  # of thoughts, where they can be counted
    open_reasoning_tokens: int = NOT_REASONING  # tokens of the thought that the prompt has begun
    late_end: bool = False  # whether reasoning may go on behind its end, which a budget set

    @property
    def plain(self) -> bool:
        """True if all of an answer is its content."""
        return self.tool is None and self.reasoning is None


def marker_ids(output_format: OutputFormat, tokenizer: Tokenizer) -> list[int]:
    """The special tokens that markers have, which must be in the text."""
    written = "\0".join(text for parser in (output_format.tool, output_format.reasoning) for text in _texts(parser))
    special = ((text, each) for text, each in tokenizer.added.items() if each in tokenizer.special_ids)
    return sorted(each for text, each in special if text in written)


def _texts(part: Any) -> Iterator[str]:
    """Yields all texts of a parser's declaration."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple | Mapping):
        for each in part:
            yield from _texts(each)
    elif is_dataclass(part):
        for each in fields(part):
            if each.name not in ("aliases", "models", "shape", "signs", "families"):
                yield from _texts(getattr(part, each.name))


def is_cut_off(completion: CompletionOutput) -> bool:
    """Returns whether something else than the model ended the answer: max_tokens, a stop string, an abort."""
    return completion.finish_reason not in (None, "stop") or completion.stop_reason is not None


@dataclass
class OutputParser:
    """One answer, as it comes. `whole`: nothing of it is sent before its end, so a call that breaks is no call."""

    output_format: OutputFormat
    whole: bool = False
    calls: int = 0  # that it has made, and are whole
    _stream_parser: StreamParser = field(init=False)
    _walk: ReasoningCounter | None = field(init=False)

    def __post_init__(self) -> None:
        to = self.output_format
        self._walk = (
            None if to.reasoning_markers is None else ReasoningCounter(to.reasoning_markers, to.open_reasoning_tokens)
        )
        late = (sys.maxsize if self.whole else MAX_LATE) if to.late_end else 0
        self._stream_parser = StreamParser(to.tool, to.reasoning, to.tools, to.begins_in_reasoning, self.whole, late)

    def count(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens."""
        if self._walk is not None:
            self._walk.advance(token_ids)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of thought so far, markers left out; None where they cannot be counted."""
        if self.output_format.reasoning is None:
            return 0
        return None if self._walk is None else self._walk.num_tokens

    def feed(self, text: str, ended: bool, cut: bool = False) -> list[Event]:
        """Returns the events that the answer's next text, or its last, makes certain; every call has an id. `cut`: the
        answer has ended, but not by itself (is_cut_off)."""
        found = self._stream_parser.feed(text) + (self._stream_parser.finish(cut) if ended else [])
        return [self._named(event) for event in found if self._told(event)]

    def finish_reason_of(self, finish_reason: str | None, called: str = "tool_calls") -> str | None:
        """Returns the finish reason for clients: `called` in place of "stop" if the answer has calls."""
        return called if finish_reason == "stop" and self.calls else finish_reason

    def _told(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self.output_format.include_reasoning
        return isinstance(event, Content) or event.index == 0 or self.output_format.parallel

    def _named(self, event: Event) -> Event:
        if isinstance(event, CallEnd) and event.complete:
            self.calls += 1
        if not isinstance(event, CallBegin):
            return event
        parser = self.output_format.tool
        assert parser is not None
        return replace(event, id=event.id or parser.call_id(event.name, self.output_format.earlier_calls + event.index))
