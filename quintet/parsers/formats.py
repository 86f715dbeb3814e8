"""Parsers as declarations of the text that a model writes around its reasoning and its tool calls."""

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quintet.parsers.combinators import LABEL, Alternatives, FormatPart, Marker, parts
from quintet.parsers.events import Tool
from quintet.parsers.lark_grammar import LarkGrammar, NoGrammar, trailing
from quintet.parsers.optional_call_grammar import OptionalCallGrammar

# A schema may also be none at all, or endless: what is made of it instead says why.
NO_GRAMMAR_ERRORS = (NoGrammar, RecursionError, TypeError, ValueError, OverflowError)
Signs = tuple[tuple[str, ...], ...]
"""Alternatives; of one of them, every text stands in the chat template."""


@dataclass(frozen=True)
class CallBlock:
    """Calls and the markers around them, from their first marker to their last. An anchored one has no marker of its
    own: it is looked for where content begins, and nowhere else. What begins with the marker of a certain one is a
    call, and never something else. One that is `code` may as well be an answer: it is shown where it is cut off.
    `written`: whether grammars have it."""

    sequence: tuple[FormatPart, ...]
    anchored: bool = False
    certain: bool = True
    code: bool = False
    written: bool = True

    @property
    def end(self) -> str:
        """The last marker; empty if there is none."""
        last = self.sequence[-1]
        last = last.sequences[0][-1] if isinstance(last, Alternatives) else last
        return last.marks()[0] if isinstance(last, Marker) else ""

    def starts(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the texts that it begins with; `names` are those of the tools."""
        return tuple(names) if self.sequence[0] == LABEL else self.sequence[0].marks()


def call_block(
    *described: str | FormatPart,
    anchored: bool = False,
    certain: bool = True,
    code: bool = False,
    written: bool = True,
) -> CallBlock:
    return CallBlock(parts(*described), anchored, certain and not code, code, written)


def call_id(name: str, position: int) -> str:
    """Returns an id for a call that has none in its text."""
    return f"call_{secrets.token_hex(12)}"


def short_id(name: str, position: int) -> str:
    """Nine letters and digits: Mistral's templates refuse any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ReasoningParser:
    """Format in which a family of models marks its thoughts.

    `inside`: whether an output begins with them if the prompt does not show it. `until`: markers that end them and are
    more than an end. `drops`: markers around content. `leads`: those of them that stand before it, in their order.
    `before_calls`: the one that stands between a thought and calls. `shown`: thoughts are content, with their markers.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    inside: bool = False
    until: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    before_calls: str = ""
    shown: bool = False
    aliases: tuple[str, ...] = ()
    models: str = ""
    signs: Signs = ()
    families: tuple[str, ...] = ()

    def grammar_with_reasoning(self, what: str, inside: bool, special: Mapping[str, int] | None = None) -> str:
        """Returns a grammar in llguidance's Lark: a thought, if any, and then `what` (of a grammar). `inside` and
        `special` as for ToolParser.grammar."""
        lark = LarkGrammar((), False, special or {})
        return lark.with_reasoning(self.opens[0], self.closes, inside, self.with_lead_markers(what, lark))

    def with_lead_markers(self, what: str, lark: LarkGrammar) -> str:
        """Such content, with the markers that may stand before it."""
        return " ".join([*(f"({lark.literal(each)})?" for each in self.leads), what])

    def for_structured_output(self) -> "ReasoningParser":
        """Returns the parser for an answer with structured output by `before`: within it no marker counts."""
        return replace(self, drops=())

    def ends_reasoning(self, prompt: str) -> bool:
        """True if the prompt ends a thought: reasoning is over, or is turned off."""
        return prompt.rstrip().endswith(self.closes)

    def begins_inside(self, prompt: str, continues: bool = False) -> bool:
        """True if the output begins within a thought; False if the prompt ends one or turns reasoning off.

        continues: the prompt ends within the answer itself, which is a thought if the last one was not closed.
        """
        end = prompt.rstrip()
        if continues:
            opened, closed = (
                max((end.rfind(mark) for mark in marks), default=-1) for marks in (self.opens, self.closes)
            )
            return opened > closed
        if self.ends_reasoning(end):
            return False
        return self.inside or end.endswith(self.opens)


@dataclass(frozen=True)
class RequiredCalls:
    """Required tool calls: at least one, of any of the tools; or one of the tool `named`.

    With `reasoning` the model may think before; `inside` says that it already does. `otherwise`: what (of a grammar) it
    may say in the place of calls.
    """

    named: str | None = None
    parallel: bool = True
    reasoning: ReasoningParser | None = None
    inside: bool = False
    alternative: str = ""


@dataclass(frozen=True)
class ToolParser:
    """Format in which a family of models writes its tool calls.

    `blocks`: the ways in which it may write them; grammars are made of the first. `separator`: what stands between two
    blocks where each has one call; None where one has them all. As space it may also end an answer. `drops`: markers
    around content. `header`: the one of them that begins each message and ends a thought; a recipient follows it.
    `call_id`: (the function's name, how many calls of the conversation come before it) -> an id as the model's
    template expects it.
    """

    blocks: tuple[CallBlock, ...]
    separator: str | None = None
    drops: tuple[str, ...] = ()
    header: str = ""
    aliases: tuple[str, ...] = ()
    models: str = ""
    shape: str = ""
    signs: Signs = ()
    families: tuple[str, ...] = ()
    call_id: Callable[[str, int], str] = call_id

    def for_structured_output(self) -> "ToolParser | None":
        """Returns the parser for answers that are calls or structured output, within which no marker counts; None if
        no marker of their own distinguishes calls."""
        first = self.blocks[0]
        return None if first.anchored else replace(self, drops=(), blocks=(replace(first, anchored=True),))

    def grammar(
        self, tools: Sequence[Tool], choice: RequiredCalls | None = None, special: Mapping[str, int] | None = None
    ) -> str | None:
        """The text that calls must have, in llguidance's Lark; None if it cannot be written.

        `special`: the tokens that llguidance keeps apart from text, and their ids: special ones, and added ones that
        are written <so> (`LLTokenizer.is_special_token`). ValueError if there is no such tool.
        """
        choice = choice or RequiredCalls()
        chosen = [each for each in tools if choice.named in (None, each.name)]
        if not chosen:
            raise ValueError(f"no tool is named {choice.named!r}" if choice.named else "calls need at least one tool")
        lark = LarkGrammar(chosen, choice.parallel and choice.named is None, special or {})
        try:
            calls = lark.sequence(self.blocks[0].sequence)
            if self.separator is not None:
                calls = lark.repeated("", calls, lark.literal(self.separator), trailing(lark, self.separator))
        except NO_GRAMMAR_ERRORS:
            return None
        thoughts = choice.reasoning
        if thoughts is not None and thoughts.before_calls:
            calls = f"({lark.literal(thoughts.before_calls)})? {calls}"
        if choice.alternative:
            other = choice.alternative
            calls = f"({calls} | {other if thoughts is None else thoughts.with_lead_markers(other, lark)})"
        return lark.with_reasoning(
            *((thoughts.opens[0], thoughts.closes) if thoughts else ("", ())), choice.inside, calls
        )

    def optional_call_grammar(
        self, tools: Sequence[Tool], choice: RequiredCalls | None = None, special: Mapping[str, int] | None = None
    ) -> str | None:
        """Returns a grammar as above of any text, with calls in it if the model makes some; the arguments follow the
        schemas of tools that are strict. None if there is none."""
        choice, special = choice or RequiredCalls(), special or {}
        held = [each if each.strict else replace(each, parameters={}) for each in tools]
        lark = LarkGrammar(held, choice.parallel, special)
        thoughts = choice.reasoning
        if thoughts is not None and any(set(each.sequence[0].marks()) & set(thoughts.until) for each in self.blocks):
            thoughts = None  # a call may begin within them
        try:
            return OptionalCallGrammar(lark, special, thoughts).grammar_text(
                [each for each in self.blocks if each.written], choice.inside, choice.parallel
            )
        except NO_GRAMMAR_ERRORS:
            return None
