"""Reads a text that arrives in pieces: whatever must wait for more of it is a generator, and yields.

A reader says what it expects as if all of the text were there. No character is looked at again because another arrived:
what is not yet read is never longer than the longest marker, unless a piece brought more at once. Where a reader
gives up does not depend on how the text was cut.
"""

import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Runs until it needs more text, yields, and goes on when there is more or the text has ended."""

SPACE = re.compile(r"\s+")


class MalformedText(Exception):
    """The text is not what the shape says that it must be."""


class Scanner:
    """A text and how far it is read. It keeps what was taken since the last `forget`, for text that is broken."""

    def __init__(self, text: str = "", ended: bool = False) -> None:
        self._text, self._at = text, 0
        self.ended = ended
        self.starved = False  # set once a reader wanted more text after the end
        self.limit: int | None = None  # characters that may be kept; one more is Broken
        self.records_consumed = True
        self.held = 0  # characters that are kept
        self.kept: list[str] = []  # pieces of the text that is kept

    def feed(self, piece: str) -> None:
        self._text, self._at = self._text[self._at :] + piece, 0

    def rest(self) -> str:
        """Returns the text that has arrived and is not yet read."""
        return self._text[self._at :]

    def empty(self) -> bool:
        """True if all text that has arrived is read."""
        return self._at >= len(self._text)

    def take(self, size: int) -> str:
        """Reads the next characters, which must have arrived."""
        if self.records_consumed and self.limit is not None and self.held + size > self.limit:
            self._keep(self._text[self._at : self._at + self.limit - self.held])
            raise MalformedText
        text = self._text[self._at : self._at + size]
        if self.records_consumed:
            self._keep(text)
        else:
            self._at += size
        return text

    def _keep(self, text: str) -> None:
        self._at += len(text)
        self.held += len(text)
        self.kept.append(text)

    def take_consumed(self) -> str:
        """Returns the text that was taken and kept, and forgets it."""
        text = "".join(self.kept)
        self.forget()
        return text

    def forget(self) -> None:
        self.kept, self.held = [], 0

    def match(self, pattern: re.Pattern[str]) -> str:
        """Takes what matches here, of what has arrived."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def peek(self, size: int) -> Steps[str]:
        """The next characters, not taken; fewer at the end of the text."""
        while len(self._text) - self._at < size and not self.ended:
            yield
        self.starved |= len(self._text) - self._at < size
        return self._text[self._at : self._at + size]

    def peek_marker(self, marks: Iterable[str]) -> Steps[str]:
        """The longest of the marks that stands here, not taken; empty if none does."""
        while True:
            best, may_grow = "", False
            left = len(self._text) - self._at
            for mark in marks:
                if len(mark) <= left:
                    if len(mark) > len(best) and self._text.startswith(mark, self._at):
                        best = mark
                elif mark.startswith(self._text[self._at :]):
                    may_grow = True
            if self.ended or not may_grow:
                self.starved |= may_grow
                return best
            yield

    def ends_within_marker(self, marks: Iterable[str]) -> bool:
        """True if the text has ended within one of the marks."""
        rest = self.rest() if self.ended else ""
        return bool(rest) and any(mark.startswith(rest) for mark in marks)

    def skip(self, *marks: str) -> Steps[str]:
        """Takes one of the marks and the space before it -> the mark; only the space if none is there."""
        yield from self.space()
        found = yield from self.peek_marker(marks)
        if found:
            self.take(len(found))
        return found

    def expect(self, *marks: str) -> Steps[str]:
        """Same as skip, but raises Broken if none of the marks is there."""
        found = yield from self.skip(*marks)
        if not found:
            raise MalformedText
        return found

    def space(self) -> Steps[None]:
        """Takes all space that stands here."""
        while True:
            self.match(SPACE)
            if not self.empty() or self.ended:
                self.starved |= self.empty()
                return
            yield

    def run(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Takes the characters that match, up to one that does not. More than `most` are Broken."""
        pieces: list[str] = []
        size = 0
        while True:
            if found := pattern.match(self._text, self._at):
                size += self._bounded(found.end() - self._at, size, most, pieces.append)
            if not self.empty() or self.ended:
                self.starved |= self.empty()
                return "".join(pieces)
            yield

    def until(self, ends: tuple[str, ...], give: Callable[[str], object], most: int | None = None) -> Steps[str]:
        """Gives the text before the first of the ends, and takes both -> the end. Broken if the text ends before, or
        is longer than `most`."""
        plain = pattern_without("".join(end[0] for end in ends))
        size = 0
        while True:
            if self.empty():
                if self.ended:
                    self.starved = True
                    raise MalformedText
                yield
                continue
            if found := (yield from self.peek_marker(ends)):
                self.take(len(found))
                return found
            if self.ends_within_marker(ends):
                raise MalformedText
            rest = plain.match(self._text, self._at + 1)
            size += self._bounded((rest.end() if rest else self._at + 1) - self._at, size, most, give)

    def _bounded(self, length: int, size: int, most: int | None, give: Callable[[str], object]) -> int:
        """Gives that many characters -> their number. Broken after the one that makes `size` become `most`."""
        if most is not None and size + length > most:
            self.take(most - size)
            raise MalformedText
        give(self.take(length))
        return length


@functools.cache
def pattern_without(characters: str) -> re.Pattern[str]:
    """Any text that has none of the characters."""
    return re.compile("[^" + re.escape(characters) + "]+")
