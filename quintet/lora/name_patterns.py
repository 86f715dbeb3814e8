"""Patterns of module paths in rank_pattern and alpha_pattern, matched in linear time: no pattern can hang a server.

PEFT looks for `(.*\\.)?(KEY)$` with Python's `re`, which backtracks. Here a pattern becomes a nondeterministic
automaton whose sets of states are computed once and kept (Thompson 1968). Known are literals, `.`, classes (`[...]`,
`\\d \\w \\s` and their opposites), groups, `|`, `^`, `$`, and the quantifiers `* + ? {m,n}`, nested or not. References,
lookarounds, flags and possessive quantifiers are refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_LENGTH = 512  # characters of a pattern
MAX_DEPTH = 16  # groups within one another
MAX_REPEAT = 64  # of {m,n}
MAX_STATES = 2048
MAX_WORK = 50_000_000  # steps of all patterns of an entry over all modules: some seconds
_MISS = 100  # steps that a set of states costs per state, the first time: what is kept takes memory

Value = TypeVar("Value")
Accepts = Callable[[str], bool]
Node = (
    tuple  # ("char", accepts) | ("all", nodes) | ("any", nodes) | ("repeat", node, least, most) | ("start",) | ("end",)
)
_PLAIN = re.compile(r"[\w.\-]+")
_ESCAPED: dict[str, Accepts] = {
    "d": str.isdecimal,
    "D": lambda char: not char.isdecimal(),
    "w": lambda char: char.isalnum() or char == "_",
    "W": lambda char: not (char.isalnum() or char == "_"),
    "s": str.isspace,
    "S": lambda char: not char.isspace(),
}


class PatternError(ValueError):
    """Text of what is wrong with a pattern."""


class ModulePatterns(Generic[Value]):
    """Values by patterns: the first pattern that matches a module's path, or what follows one of its dots, counts."""

    def __init__(self, entries: Mapping[str, Value]) -> None:
        """PatternError names a pattern that is refused."""
        self._work = 0
        self._plain: dict[tuple[int, tuple[int, ...]], dict[str, tuple[int, Value]]] = {}
        self._patterns: list[tuple[int, Automaton, Value]] = []
        for order, (key, value) in enumerate(entries.items()):
            if len(key) > MAX_LENGTH:
                raise PatternError(f"the pattern {key[:64]!r}... has {len(key)} characters, {MAX_LENGTH} are allowed")
            if _PLAIN.fullmatch(key):  # of one length: found by a look-up, as there may be one for each module
                dots = tuple(at for at, char in enumerate(key) if char == ".")
                self._plain.setdefault((len(key), dots), {}).setdefault(key, (order, value))
            else:
                self._patterns.append((order, Automaton(key), value))

    def find(self, path: str) -> Value | None:
        """Returns the value for a module's path, None where no pattern matches. PatternError: it takes too long."""
        found = self._find_plain(path)
        for order, automaton, value in self._patterns:
            if found is not None and found[0] < order:
                break
            matches, work = automaton.matches(path)
            self._count(work)
            if matches:
                return value
        return None if found is None else found[1]

    def _find_plain(self, path: str) -> tuple[int, Value] | None:
        found: tuple[int, Value] | None = None
        self._count(len(self._plain))
        for (length, dots), keys in self._plain.items():
            if length > len(path) or (length < len(path) and path[-length - 1] != "."):
                continue
            tail = list(path[-length:])
            for at in dots:
                tail[at] = "."  # which stands for any character
            match = keys.get("".join(tail))
            if match is not None and (found is None or match[0] < found[0]):
                found = match
        return found

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise PatternError("its patterns take too long to match with the modules' names; write the names out")


@dataclass
class _State:
    accepts: Accepts | None = None  # of a character; then the only one of `following` comes next
    anchor: str = ""  # "start" or "end": passed there alone
    following: list[int] = field(default_factory=list)


class Automaton:
    """A pattern that is matched with a path, or with what follows one of its dots, up to its end."""

    def __init__(self, pattern: str) -> None:
        self._states = [_State()]  # 0: the pattern has matched
        try:
            _Parser(pattern).parse()  # is one by itself
            self._first = frozenset([self._add(_Parser(rf"(.*\.)?({pattern})$").parse(), 0)])
        except PatternError as error:
            raise PatternError(f"the pattern {pattern!r} {error}") from None
        self._steps: dict[tuple[frozenset[int], str, bool], frozenset[int]] = {}
        self._ends: dict[tuple[frozenset[int], bool], bool] = {}

    def matches(self, path: str) -> tuple[bool, int]:
        """Returns whether the path matches, and the steps that it took."""
        current, work = self._first, len(path) + 1
        for position, char in enumerate(path):
            step = (current, char, position == 0)
            if step not in self._steps:
                reached = self._closure(current, position == 0, False)
                work += _MISS * len(reached)
                states = [self._states[each] for each in reached]
                self._steps[step] = frozenset(s.following[0] for s in states if s.accepts and s.accepts(char))
            current = self._steps[step]
            if not current:
                return False, work
        end = (current, not path)
        if end not in self._ends:
            self._ends[end] = 0 in self._closure(current, not path, True)
            work += _MISS * len(current)
        return self._ends[end], work

    def _closure(self, states: frozenset[int], at_start: bool, at_end: bool) -> set[int]:
        """The states that are reached without a character."""
        reached, waiting = set(states), list(states)
        while waiting:
            state = self._states[waiting.pop()]
            if state.accepts or (state.anchor == "start" and not at_start) or (state.anchor == "end" and not at_end):
                continue
            new = [each for each in state.following if each not in reached]
            reached.update(new)
            waiting += new
        return reached

    def _new(self, state: _State) -> int:
        if len(self._states) >= MAX_STATES:
            raise PatternError("repeats too much; write the names out")
        self._states.append(state)
        return len(self._states) - 1

    def _add(self, node: Node, after: int) -> int:
        """Adds a node whose match is followed by the state `after`; returns its first state."""
        match node:
            case ("char", accepts):
                return self._new(_State(accepts=accepts, following=[after]))
            case ("all", nodes):
                for each in reversed(nodes):
                    after = self._add(each, after)
                return after
            case ("any", nodes):
                return self._new(_State(following=[self._add(each, after) for each in nodes]))
            case ("repeat", inner, least, most):
                return self._repeat(inner, least, most, after)
            case (anchor,):
                return self._new(_State(anchor=anchor, following=[after]))
        raise AssertionError(node)

    def _repeat(self, inner: Node, least: int, most: int | None, after: int) -> int:
        first = after
        if most is None:
            first = self._new(_State())
            self._states[first].following = [self._add(inner, first), after]
        else:
            for _ in range(most - least):
                first = self._new(_State(following=[self._add(inner, first), after]))
        for _ in range(least):
            first = self._add(inner, first)
        return first


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("has a ) without (")
        return node

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        there = self._peek(text)
        self._at += len(text) * there
        return there

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("ends within a group, a class or an escape")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> Node:
        nodes = [self._sequence()]
        while self._take("|"):
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else ("any", nodes)

    def _sequence(self) -> Node:
        nodes = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            nodes.append(self._quantified(self._atom()))
        return ("all", nodes)

    def _quantified(self, node: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return node
        if node[0] in ("start", "end"):
            raise PatternError("repeats ^ or $, which means nothing")
        self._take("?")  # the shortest first: the same matches
        if self._peek("+") or self._counts() is not None:
            raise PatternError("has a quantifier after a quantifier, which is not supported")
        return ("repeat", node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        for text, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(text):
                return counts
        match = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}").match(self._text, self._at)
        if match is None or not (match[1] or match[3]):
            return None  # a brace that stands for itself
        self._at = match.end()
        least, most = int(match[1] or 0), (int(match[3]) if match[3] else None) if match[2] else int(match[1])
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            raise PatternError(f"has {match[0]}: counts go up to {MAX_REPEAT}, the smaller first")
        return least, most

    def _atom(self) -> Node:
        match char := self._next():
            case "(":
                return self._group()
            case "[":
                return ("char", self._class())
            case ".":
                return ("char", lambda char: char != "\n")
            case "^":
                return ("start",)
            case "$":
                return ("end",)
            case "*" | "+" | "?":
                raise PatternError(f"has {char} with nothing before it")
            case "\\":
                return ("char", self._escape())
        return ("char", char.__eq__)

    def _group(self) -> Node:
        if self._take("?") and not self._take(":"):
            named = re.compile(r"P<\w+>").match(self._text, self._at)
            if named is None:
                raise PatternError("has (?...), a lookaround, a reference or a flag, which is not supported")
            self._at = named.end()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"nests groups more than {MAX_DEPTH} deep")
        node = self._alternatives()
        if not self._take(")"):
            raise PatternError("has a ( without )")
        self._depth -= 1
        return node

    def _escape(self) -> Accepts:
        char = self._next()
        if char in _ESCAPED:
            return _ESCAPED[char]
        if char.isalnum():
            raise PatternError(f"has \\{char}, which is not supported")
        return char.__eq__

    def _class(self) -> Accepts:
        negated = self._take("^")
        parts = list(self._class_parts())
        return lambda char: any(part(char) for part in parts) != negated

    def _class_parts(self) -> Iterator[Accepts]:
        first = True
        while (char := self._next()) != "]" or first:
            first = False
            if char == "\\":
                yield self._escape()
            elif self._peek("-") and not self._peek("-]"):
                self._next()
                last = self._next()
                if last == "\\" or last < char:
                    raise PatternError(f"has the range {char}-{last}, which is not supported")
                yield _range(char, last)
            else:
                yield char.__eq__


def _range(first: str, last: str) -> Accepts:
    return lambda char: first <= char <= last
