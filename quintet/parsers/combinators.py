"""The parts that a call's text is made of. One description of a format is read, and written as a grammar.

Space between two parts is passed over. A literal is as the model writes it: its line breaks count in a grammar.
"""

import json
from dataclasses import dataclass
from typing import Literal, Protocol

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.grammar import NOTHING, Lark, NoGrammar
from quintet.parsers.scanner import MalformedText, Scanner, Steps
from quintet.parsers.value_grammar import arguments
from quintet.parsers.value_reader import JSON, MAX_NAME, WORD, Notation, converted, read_name, read_value


class Part(Protocol):
    """One part of a format; a plug-in may bring its own."""

    def marks(self) -> tuple[str, ...]:
        """Returns the texts that it can begin with; empty if with any word."""

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        """Raises Broken where the text is something else."""

    def lark(self, grammar: Lark) -> str:
        """The text that it stands for. Raises NoGrammar if none can be given."""


def parts(*described: "str | Part") -> tuple[Part, ...]:
    """A sequence; a string is a literal."""
    return tuple(Mark(each) if isinstance(each, str) else each for each in described)


def starts(part: Part, scan: Scanner) -> Steps[bool]:
    """Returns whether the part begins here."""
    yield from scan.space()
    if marks := part.marks():
        return bool((yield from scan.sees(marks)))
    return bool(WORD.match((yield from scan.ahead(1))))


def read_all(sequence: tuple[Part, ...], scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
    for part in sequence:
        yield from part.read(scan, calls)


@dataclass(frozen=True)
class Mark:
    """A literal."""

    text: str

    def marks(self) -> tuple[str, ...]:
        return (self.text.strip(),)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if mark := self.text.strip():
            yield from scan.expect(mark)

    def lark(self, grammar: Lark) -> str:
        return grammar.literal(self.text)


@dataclass(frozen=True)
class Word:
    """The function's name, which begins a call, or the call's id, or a word that says nothing.

    `pattern`: of a word that is no name, what a grammar has in its place, in Lark.
    """

    role: Literal["name", "id", ""] = ""
    pattern: str = ""

    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        yield from scan.space()
        word = yield from scan.run(WORD, MAX_NAME)
        if not word:
            raise MalformedText
        if self.role == "name":
            calls.begin()
            calls.named(word)
        elif self.role == "id":
            calls.identified(word)

    def lark(self, grammar: Lark) -> str:
        if self.role != "name":
            return self.pattern
        if not WORD.fullmatch(grammar.tool.name) or len(grammar.tool.name) > MAX_NAME:
            raise NoGrammar
        return grammar.literal(grammar.tool.name)


NAME = Word("name")


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call, after its name; they end the call."""

    notation: Notation = JSON
    comma: str = ", "  # between two values, where a grammar writes what is no JSON

    def marks(self) -> tuple[str, ...]:
        return (self.notation.arguments.open,)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        yield from read_value(scan, calls.write, self.notation, self.notation.arguments)
        calls.whole()
        calls.close()

    def lark(self, grammar: Lark) -> str:
        return grammar.arguments() if self.notation is JSON else arguments(grammar, self.notation, self.comma)


@dataclass(frozen=True)
class Call:
    """A JSON object with the function's name and its arguments, in any order. A strict one has no other keys than
    these and an id: where no marker stands before it, it may as well be an answer in JSON."""

    name: str = "name"
    arguments: str = "arguments"
    strict: bool = False
    number: str = ""  # the key of the call's number, where a model writes one

    def marks(self) -> tuple[str, ...]:
        return ("{",)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        calls.begin()
        yield from scan.expect("{")
        while True:
            key = yield from read_name(scan, JSON)
            yield from scan.expect(":")
            yield from self._value(key, scan, calls)
            if (yield from scan.expect(",", "}")) == "}":
                break
        if calls.unwritten and not self.strict:
            calls.write("{")
            calls.write("}")
            calls.whole()
        calls.close()

    def _value(self, key: str, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if key == self.name:
            calls.named(json.loads(f'"{(yield from read_name(scan, JSON))}"', strict=False))
        elif key in (self.arguments, "arguments", "parameters"):
            yield from self._arguments(scan, calls)
        elif self.strict and key not in ("id", "type"):
            raise MalformedText
        else:
            yield from read_value(scan, lambda text: None, JSON)

    def _arguments(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        """An object; nothing at all; or a string that holds an object, as some models write it."""
        if not calls.unwritten:
            raise MalformedText
        if (yield from scan.skip("null")):
            calls.write("{")
            calls.write("}")
        elif (yield from scan.sees(('"',))):
            inner = yield from read_name(scan, JSON)
            text = converted(json.loads(f'"{inner}"', strict=False), JSON, JSON.arguments)
            if text is None:
                raise MalformedText
            calls.write(text[:1])
            calls.write(text[1:])
        else:
            yield from read_value(scan, calls.write, JSON, JSON.arguments)
        calls.whole()

    def lark(self, grammar: Lark) -> str:
        name = json.dumps(grammar.tool.name, ensure_ascii=False)
        number = f'{{"{self.number}": "' if self.number else ""
        head = ('", ' if number else "{") + f'"{self.name}": {name}, "{self.arguments}": '
        before = f"{grammar.literal(number)} /[0-9]{{1,3}}/" if number else ""
        return f"{before} {grammar.literal(head)} {grammar.arguments()} {grammar.literal('}')}"


@dataclass(frozen=True)
class Many:
    """One or more of a sequence, with something between them."""

    sequence: tuple[Part, ...]
    between: str = ""

    def marks(self) -> tuple[str, ...]:
        return self.sequence[0].marks()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        more = True
        while more:
            yield from read_all(self.sequence, scan, calls)
            if mark := self.between.strip():
                more = bool((yield from scan.skip(mark)))
            else:
                more = yield from starts(self.sequence[0], scan)

    def lark(self, grammar: Lark) -> str:
        """Joins `between` and the marker after it into one literal: by itself `between` might begin another one."""
        first, rest = self.sequence[0], self.sequence[1:]
        if not isinstance(first, Mark):
            return grammar.repeated("", grammar.sequence(self.sequence), grammar.literal(self.between))
        between = grammar.literal(self.between + first.text)
        return grammar.repeated(grammar.literal(first.text), grammar.sequence(rest), between)


@dataclass(frozen=True)
class Maybe:
    """A sequence that need not be there. `written`: whether the model writes it, where that is known."""

    sequence: tuple[Part, ...]
    written: bool | None = None

    def marks(self) -> tuple[str, ...]:
        return self.sequence[0].marks()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if (yield from starts(self.sequence[0], scan)):
            yield from read_all(self.sequence, scan, calls)

    def lark(self, grammar: Lark) -> str:
        if self.written is None:
            return f"({grammar.sequence(self.sequence)})?"
        return grammar.sequence(self.sequence) if self.written else NOTHING


@dataclass(frozen=True)
class Either:
    """The first of several sequences that begins here."""

    sequences: tuple[tuple[Part, ...], ...]

    def marks(self) -> tuple[str, ...]:
        return tuple(mark for sequence in self.sequences for mark in sequence[0].marks())

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        for sequence in self.sequences:
            if (yield from starts(sequence[0], scan)):
                yield from read_all(sequence, scan, calls)
                return
        raise MalformedText

    def lark(self, grammar: Lark) -> str:
        return "(" + " | ".join(grammar.sequence(sequence) for sequence in self.sequences) + ")"


def many(*described: str | Part, between: str = "") -> Many:
    return Many(parts(*described), between)


def maybe(*described: str | Part, written: bool | None = None) -> Maybe:
    return Maybe(parts(*described), written)


def either(*described: tuple[str | Part, ...]) -> Either:
    return Either(tuple(parts(*each) for each in described))
