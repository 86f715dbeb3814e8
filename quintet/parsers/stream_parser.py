"""Splits a model's output into what it thinks, what it says and what it calls, as it arrives."""

import functools
import re
from collections.abc import Sequence

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.combinators import read_all
from quintet.parsers.events import Content, Event, Parsed, Reasoning, Tool, gather, merged
from quintet.parsers.formats import CallBlock, ReasoningParser, ToolParser
from quintet.parsers.scanner import MalformedText, Scanner, Steps

MAX_HELD = 2**20  # characters that may turn out to be a call and do not yet

Kind = type[Reasoning] | type[Content]
Marked = Kind | CallBlock
"""What a marker begins."""


class StreamParser:
    """One output. What it gives is final: text that may still become a marker is held back, and no other text.

    Space beside a marker belongs to the marker. Text that is no call after all, however far it looked like one, is
    content; so is what follows a broken one. No text raises anything.
    """

    def __init__(
        self,
        tool: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        tools: Sequence[Tool] = (),
        inside: bool | None = None,
    ) -> None:
        """`inside`: whether the output begins within a thought (ReasoningParser.begins_inside)."""
        self._scan, self._events = Scanner(), list[Event]()
        self._calls = CallEventBuilder(self._scan, self._events.append, {each.name: each.parameters for each in tools})
        self._kind: Kind = Content
        if reasoning is not None and (reasoning.inside if inside is None else inside):
            self._kind = Reasoning
        self._trim = self._kind is Reasoning  # space at the beginning of the next text, which a marker stands before
        self._fresh = True  # whether nothing but markers came before, since the beginning or the last marker
        self._until = frozenset(reasoning.until if reasoning else ())
        self._anywhere, self._anchored = _markers(tool, reasoning)
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        """More of the output -> what it makes certain."""
        self._scan.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The output has ended -> the rest of it. Then nothing more may be fed."""
        self._scan.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events = merged(self._events)
        self._events.clear()
        return events

    def _run(self) -> Steps[None]:
        while mark := (yield from self._text()):
            begins = self._marks()[mark]
            if isinstance(begins, CallBlock):
                yield from self._read(begins)
                continue
            if mark not in self._until or self._kind is Content:
                self._scan.take(len(mark))
                self._scan.forget()
            self._kind, self._trim, self._fresh = begins, True, True

    def _text(self) -> Steps[str]:
        """Gives text, up to the next marker -> the marker, not taken; empty at the end."""
        plain = _plain(tuple(self._anywhere[self._kind]))
        while True:
            yield from self._scan.space()
            if found := (yield from self._scan.peek_marker(tuple(self._marks()))):
                return found
            if self._scan.empty():
                self._give()
                return ""
            self._scan.take(1)
            self._give()
            self._scan.match(plain)
            self._give()

    def _marks(self) -> dict[str, Marked]:
        """Returns the markers that may stand here, and what each begins."""
        anywhere = self._anywhere[self._kind]
        return anywhere | self._anchored[self._kind] if self._fresh else anywhere

    def _give(self) -> None:
        """Emits the kept text as an event."""
        text = self._scan.take_consumed()
        if self._trim:
            text = text.lstrip()
        if text:
            self._events.append(self._kind(text))
            self._trim = self._fresh = False

    def _read(self, block: CallBlock) -> Steps[None]:
        """Calls; where they are broken, what is left of them is content."""
        before = self._calls.count
        self._scan.limit = self._scan.held + MAX_HELD
        try:
            yield from read_all(block.sequence, self._scan, self._calls)
            broken = self._calls.count == before
        except MalformedText:
            broken = True
        self._scan.limit = None
        self._calls.abandon()
        if self._calls.count > before:
            self._trim = self._fresh = True
        if not broken:
            self._scan.forget()
            return
        self._give()
        if self._calls.count > before:
            yield from self._leave(block)

    def _leave(self, block: CallBlock) -> Steps[None]:
        """Leaves a block after a broken call: its end may still come, after a forgotten brace, or be cut off."""
        if (yield from self._scan.skip(block.end)):
            self._scan.forget()
            self._trim = self._fresh = True
        elif self._scan.ended:
            self._scan.take(len(self._scan.rest()))
            self._scan.forget()


def _markers(
    tool: ToolParser | None, reasoning: ReasoningParser | None
) -> tuple[dict[Kind, dict[str, Marked]], dict[Kind, dict[str, Marked]]]:
    """For each kind of text what each marker in it begins: those that count anywhere, and those at its beginning."""
    anywhere: dict[Kind, dict[str, Marked]] = {Content: {}, Reasoning: {}}
    anchored: dict[Kind, dict[str, Marked]] = {Content: {}, Reasoning: {}}
    for each in tool.blocks if tool else ():
        place = anchored if each.anchored else anywhere
        place[Content] |= dict.fromkeys(each.sequence[0].marks(), each)
    for drops in (tool.drops if tool else (), reasoning.drops if reasoning else ()):
        anywhere[Content] |= dict.fromkeys(drops, Content)
    if reasoning:
        for kind in (Content, Reasoning):
            anchored[kind] |= dict.fromkeys(reasoning.opens, Reasoning)
        anchored[Content] |= dict.fromkeys(reasoning.leads, Content)
        anywhere[Reasoning] |= dict.fromkeys(reasoning.closes + reasoning.until, Content)
    return anywhere, anchored


@functools.cache
def _plain(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Text in which no marker begins and that has no space at its end."""
    firsts = re.escape("".join(sorted({mark[0] for mark in marks})))
    return re.compile(rf"[^\s{firsts}]+(?:\s+[^\s{firsts}]+)*")


def parse(
    text: str,
    tool: ToolParser | None = None,
    reasoning: ReasoningParser | None = None,
    tools: Sequence[Tool] = (),
    inside: bool | None = None,
) -> Parsed:
    """A whole output at once: the same as its pieces, however it is cut."""
    splitter = StreamParser(tool, reasoning, tools, inside)
    return gather(splitter.feed(text) + splitter.finish())
