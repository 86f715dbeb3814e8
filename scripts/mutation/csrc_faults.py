"""Faults in C++, found in the text: comments, strings and preprocessor lines are masked, the rest is changed."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

MASKED = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M
)
# Operators have blanks on both sides, as the formatter writes them; brackets of templates, pointers and & have not.
SWAPS = (
    (re.compile(r"(?<= )<(?= )"), "<="),
    (re.compile(r"(?<= )<=(?= )"), "<"),
    (re.compile(r"(?<= )>(?= )"), ">="),
    (re.compile(r"(?<= )>=(?= )"), ">"),
    (re.compile(r"(?<= )==(?= )"), "!="),
    (re.compile(r"(?<= )!=(?= )"), "=="),
    (re.compile(r"(?<=[\w)\]] )\+(?= )"), "-"),
    (re.compile(r"(?<=[\w)\]] )-(?= )"), "+"),
    (re.compile(r"(?<=[\w)\]] )\*(?= )"), "+"),
    (re.compile(r"(?<= )\+=(?= )"), "-="),
    (re.compile(r"(?<= )\|\|(?= )"), "&&"),
    (re.compile(r"(?<= )&&(?= )"), "||"),
    (re.compile(r"\bstd::min\b"), "std::max"),
    (re.compile(r"\bstd::max\b"), "std::min"),
    (re.compile(r"(?<![\w!])!(?=[\w(])"), ""),
)
NUMBER = re.compile(r"(?<![\w.'])(?:0|[1-9]\d*)(?=[UL]*\b(?![\w.']))")


@dataclass(frozen=True)
class Place:
    """One change of a text."""

    line: int
    start: int  # offset in the text
    old: str
    new: str
    again: int = 0  # the same change stands before it in the line so many times

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    @property
    def change(self) -> str:
        return f"{self.old} -> {self.new or 'nothing'}" + f" #{self.again + 1}" * bool(self.again)


def masked(text: str) -> str:
    """The text with blanks in the place of what is not compiled, or is no code; offsets and lines stay."""
    return MASKED.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def places(text: str) -> list[Place]:
    """Every fault that there is room for, in the order of the text."""
    seen: Counter[tuple[int, str, str]] = Counter()
    found = []
    for place in sorted(_places(masked(text)), key=lambda place: (place.start, place.new)):
        key = place.line, place.old, place.new
        found.append(replace(place, again=seen[key]))
        seen[key] += 1
    return found


def _places(code: str) -> Iterator[Place]:
    for pattern, new in SWAPS:
        for found in pattern.finditer(code):
            yield Place(code.count("\n", 0, found.start()) + 1, found.start(), found.group(), new)
    for found in NUMBER.finditer(code):
        yield Place(code.count("\n", 0, found.start()) + 1, found.start(), found.group(), str(int(found.group()) + 1))
