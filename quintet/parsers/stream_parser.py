"""Splits a model's output into what it thinks, what it says and what it calls, as it arrives."""

import functools
import re
from collections.abc import Iterable, Sequence

from quintet.parsers.call_events import CallEventBuilder, LateEnd
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

    Space beside a marker belongs to the marker; between two contents that a call separates there is space if there was
    some. Text that is no call after all, however far it looked like one, is content; so is what follows a broken one. A
    call ends a thought. No text raises anything.
    """

    def __init__(
        self,
        tool: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        tools: Sequence[Tool] = (),
        inside: bool | None = None,
        whole_calls: bool = False,
        late_end: int = 0,
    ) -> None:
        """`inside`: whether the output begins within a thought (ReasoningParser.begins_inside). `whole_calls`: a call
        comes once it has ended, and one that is broken is content as the rest. `late_end`: up to so many characters
        behind a thought are held, and are thought if its end comes again."""
        self._scan, self._events = Scanner(), list[Event]()
        self._whole_calls, self._cut = whole_calls, False
        schemas = {each.name: each.parameters for each in tools}
        self._late = LateEnd(self._events.append, late_end)
        self._emit = self._late.add if late_end else self._events.append
        self._calls = CallEventBuilder(self._scan, self._emit, schemas, whole_calls)
        self._kind: Kind = Content
        self._spoke = False  # whether there was content
        inside = reasoning is not None and (reasoning.inside if inside is None else inside)
        if reasoning is not None and reasoning.shown:
            if inside:
                self._emit(Content(reasoning.opens[0]))
                self._spoke = True
            reasoning, inside = None, False
        if inside:
            self._kind = Reasoning
        self._trim = self._kind is Reasoning  # space at the beginning of the next text, which a marker stands before
        self._fresh = True  # whether nothing but markers came before, since the beginning or the last marker
        self._gap: str | None = None  # space before the call that came since the last content
        self._header = tool.header if tool else ""
        self._in_header = bool(self._header) and not inside  # whether the next text is a message's header
        self._until = frozenset(reasoning.until if reasoning else ())
        self._closes = reasoning.closes if reasoning else ()
        self._anywhere, self._anchored = _markers(tool, reasoning, schemas)
        if late_end:
            self._anywhere[Content] |= dict.fromkeys(self._closes, Content)
        self._steps = self._run()

    def feed(self, text: str) -> list[Event]:
        """More of the output -> what it makes certain."""
        self._scan.feed(text)
        return self._advance()

    def finish(self, cut: bool = False) -> list[Event]:
        """The output has ended -> the rest of it. Then nothing more may be fed. `cut`: the model did not end it; the
        beginning of a marker or of a call, which might have become one, is left out."""
        self._scan.ended, self._cut = True, cut
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
            if mark in self._closes:
                self._late.close(first=self._kind is Reasoning)
            self._in_header = mark == self._header
            if self._in_header:
                self._end_thought()
            self._kind, self._trim, self._fresh = begins, True, True
        self._late.release()

    def _text(self) -> Steps[str]:
        """Gives text, up to the next marker -> the marker, not taken; empty at the end."""
        plain = _plain(tuple(self._anywhere[self._kind]))
        while True:
            yield from self._scan.space()
            found = yield from self._scan.peek_marker(tuple(self._marks()))
            if self._cut and self._scan.ends_within_marker(self._symbols()):
                self._drop_rest()
            elif found:
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

    def _symbols(self) -> list[str]:
        """Returns the markers that may stand here and that begin like no code; outside of a header, like no word."""
        words, marks = not self._in_header, self._marks().items()
        return [mark for mark, begins in marks if not (words and mark[0].isalnum() or getattr(begins, "code", False))]

    def _drop_rest(self) -> None:
        self._scan.take(len(self._scan.rest()))
        self._scan.forget()

    def _give(self) -> None:
        """Emits the kept text as an event."""
        text = self._scan.take_consumed()
        if self._trim:
            space = text[: len(text) - len(text.lstrip())]
            text = text.lstrip()
            if text and self._kind is Content and self._spoke and self._gap is not None:
                text = (self._gap or space) + text
        if text:
            self._emit(self._kind(text))
            self._trim = self._fresh = self._in_header = False
            if self._kind is Content:
                self._spoke, self._gap = True, None

    def _read(self, block: CallBlock) -> Steps[None]:
        """Calls; where they are broken, what is left of them is content."""
        before, space = self._calls.count, "".join(self._scan.kept)
        self._scan.limit = None if self._whole_calls else self._scan.held + MAX_HELD
        self._scan.starved = False
        try:
            yield from read_all(block.sequence, self._scan, self._calls)
            broken = self._calls.count == before
        except MalformedText:
            broken = True
        self._scan.limit = None
        cut = broken and self._scan.starved and ((self._cut and not block.code) or self._calls.count > before)
        self._calls.abandon(cut)
        if self._calls.count > before:
            self._trim = self._fresh = True
            self._gap = space if self._gap is None else self._gap
            self._end_thought()
        if cut:
            self._drop_rest()
        elif not broken:
            self._scan.forget()
        else:
            self._give()
            if self._calls.count > before:
                yield from self._leave(block)

    def _end_thought(self) -> None:
        """Ends a thought that a call ended; its own end, if that comes later, is no content."""
        if self._kind is Reasoning:
            self._kind = Content
            self._anywhere[Content] |= dict.fromkeys(self._closes, Content)

    def _leave(self, block: CallBlock) -> Steps[None]:
        """Leaves a block after a broken call: its end may still come, after a forgotten brace, or be cut off."""
        if (yield from self._scan.skip(block.end)):
            self._scan.forget()
            self._trim = self._fresh = True
        elif self._scan.ended:
            self._drop_rest()


def _markers(
    tool: ToolParser | None, reasoning: ReasoningParser | None, names: Iterable[str]
) -> tuple[dict[Kind, dict[str, Marked]], dict[Kind, dict[str, Marked]]]:
    """For each kind of text what each marker in it begins: those that count anywhere, and those at its beginning."""
    anywhere: dict[Kind, dict[str, Marked]] = {Content: {}, Reasoning: {}}
    anchored: dict[Kind, dict[str, Marked]] = {Content: {}, Reasoning: {}}
    for each in tool.blocks if tool else ():
        place = anchored if each.anchored else anywhere
        place[Content] |= dict.fromkeys(each.starts(names), each)
        if not (each.anchored or each.code):
            anywhere[Reasoning] |= dict.fromkeys(each.starts(names), each)
    if tool and tool.header:
        anywhere[Reasoning][tool.header] = Content
    for drops in (tool.drops if tool else (), reasoning.drops if reasoning else ()):
        anywhere[Content] |= dict.fromkeys(drops, Content)
    if reasoning:
        for kind in (Content, Reasoning):
            anchored[kind] |= dict.fromkeys((mark.strip() for mark in reasoning.opens), Reasoning)
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
