"""What a model's answer is made of: thoughts, words and calls, told apart by the parsers that fit its template."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol

from quintet.engine.thoughts import OUTSIDE, Marks, Walk, find_parser
from quintet.engine.tokenizer import Tokenizer
from quintet.parsers import (
    TOOL_PARSERS,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    ReasoningParser,
    Splitter,
    Tool,
    ToolParser,
    detect,
)


class Named(Protocol):
    """Who says which parsers are wanted: "none" is none, and where nothing is said those that fit are taken."""

    @property
    def tool_call_parser(self) -> str | None: ...

    @property
    def reasoning_parser(self) -> str | None: ...


@dataclass(frozen=True)
class Parsers:
    """Of a model; None where it has no such thing, or nobody knows how it writes it."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None

    @classmethod
    def of(cls, named: "Named", tokenizer: Tokenizer | None, template: str | None, family: str = "") -> "Parsers":
        """Those that are named, or those that fit the chat template and the model's family.

        ValueError if there is none of such a name.
        """
        own = "" if tokenizer is None else tokenizer.templates
        tool = named.tool_call_parser or detect(template or own, family)[0]
        added = () if tokenizer is None else tokenizer.added
        return cls(
            None if tool in (None, "none") else TOOL_PARSERS.get(tool),
            find_parser(named.reasoning_parser, template or own, family, added),
        )


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
    marks: Marks | None = None  # of thoughts, where they can be counted
    begun: int = OUTSIDE  # tokens of the thought that the prompt has begun

    @property
    def plain(self) -> bool:
        """Whether all of an answer is its content."""
        return self.tool is None and self.reasoning is None


def marker_ids(listening: Listening, tokenizer: Tokenizer) -> list[int]:
    """The special tokens that markers have, which must be in the text."""
    written = "\0".join(text for parser in (listening.tool, listening.reasoning) for text in _texts(parser))
    special = ((text, each) for text, each in tokenizer.added.items() if each in tokenizer.special_ids)
    return sorted(each for text, each in special if text in written)


def _texts(part: Any) -> Iterator[str]:
    """All that a declaration writes."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _texts(each)
    elif is_dataclass(part):
        for each in fields(part):
            if each.name not in ("aliases", "models", "shape", "signs", "families"):
                yield from _texts(getattr(part, each.name))


@dataclass
class Speech:
    """One answer, as it comes."""

    listening: Listening
    calls: int = 0  # that it has made, and are whole
    _splitter: Splitter = field(init=False)
    _walk: Walk | None = field(init=False)

    def __post_init__(self) -> None:
        to = self.listening
        self._walk = None if to.marks is None else Walk(to.marks, to.begun)
        self._splitter = Splitter(to.tool, to.reasoning, to.tools, to.inside)

    def count(self, token_ids: Sequence[int]) -> None:
        """The answer's next tokens."""
        if self._walk is not None:
            self._walk.take(token_ids)

    @property
    def thought(self) -> int | None:
        """Tokens of thought so far, markers left out; None where they cannot be counted."""
        if self.listening.reasoning is None:
            return 0
        return None if self._walk is None else self._walk.said

    def hear(self, text: str, ended: bool) -> list[Event]:
        """What the next text of the answer, or its last, is certain to be; every call has an id."""
        found = self._splitter.feed(text) + (self._splitter.finish() if ended else [])
        return [self._named(event) for event in found if self._told(event)]

    def reason(self, finish_reason: str | None, called: str = "tool_calls") -> str | None:
        """Why it ended, as clients are told: by its calls, if it has made any."""
        return called if finish_reason == "stop" and self.calls else finish_reason

    def _told(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self.listening.tell_thoughts
        return isinstance(event, Content) or event.index == 0 or self.listening.parallel

    def _named(self, event: Event) -> Event:
        if isinstance(event, CallEnd) and event.complete:
            self.calls += 1
        if not isinstance(event, CallBegin):
            return event
        parser = self.listening.tool
        assert parser is not None
        return replace(event, id=event.id or parser.call_id(event.name, self.listening.earlier + event.index))
