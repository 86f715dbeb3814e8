"""The parts that a call's text is made of. One description of a format is read, and written as a grammar.

Space between two parts is passed over. A literal is as the model writes it: its line breaks count in a grammar.
"""

import json
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.lark_grammar import NOTHING, LarkGrammar, NoGrammar, trailing
from quintet.parsers.python_values import read_arguments
from quintet.parsers.scanner import MalformedText, Scanner, Steps
from quintet.parsers.value_grammar import arguments
from quintet.parsers.value_reader import JSON, MAX_NAME, PYTHON, WORD, Notation, read_name, read_value, to_json


class FormatPart(Protocol):
    """One part of a format; a plug-in may bring its own."""

    def marks(self) -> tuple[str, ...]:
        """Returns the texts that it can begin with; empty if with any word."""

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        """Raises Broken where the text is something else."""

    def lark(self, grammar: LarkGrammar) -> str:
        """The text that it stands for. Raises NoGrammar if none can be given."""


def parts(*described: "str | FormatPart") -> tuple[FormatPart, ...]:
    """A sequence; a string is a literal."""
    sequence = [Marker(each) if isinstance(each, str) else each for each in described]
    for at, part in enumerate(sequence):
        end = sequence[at + 1] if at + 1 < len(sequence) else Marker("")
        if isinstance(part, OneOrMore) and isinstance(end, Marker) and not end.text.startswith(part.separator):
            sequence[at] = replace(part, may_trail=True)
    return tuple(sequence)


def starts_here(part: FormatPart, scan: Scanner) -> Steps[bool]:
    """Returns whether the part begins here."""
    yield from scan.space()
    if marks := part.marks():
        return bool((yield from scan.peek_marker(marks)))
    return bool(WORD.match((yield from scan.peek(1))))


def read_all(sequence: tuple[FormatPart, ...], scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
    for part in sequence:
        yield from part.read(scan, calls)


@dataclass(frozen=True)
class Marker:
    """A literal."""

    text: str

    def marks(self) -> tuple[str, ...]:
        return (self.text.strip(),)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if mark := self.text.strip():
            yield from scan.expect(mark)

    def lark(self, grammar: LarkGrammar) -> str:
        return grammar.literal(self.text)


@dataclass(frozen=True)
class Word:
    """The function's name, which begins a call; its "label", which stands before the call and is no part of it; the
    call's id; or a word that says nothing.

    `pattern`: of a word that is no name, what a grammar has in its place, in Lark. `doubled`: a tool `f` may also be
    called `f.f`.
    """

    role: Literal["name", "label", "id", ""] = ""
    pattern: str = ""
    doubled: bool = False

    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        yield from scan.space()
        word = yield from scan.run(WORD, MAX_NAME)
        if not word:
            raise MalformedText
        if self.role == "name":
            calls.begin()
            head, _, tail = word.partition(".")
            known = calls.knows(word) or not calls.knows(head)
            calls.set_name(head if self.doubled and head == tail and not known else word)
        elif self.role == "id":
            calls.set_id(word)

    def lark(self, grammar: LarkGrammar) -> str:
        if self.role not in ("name", "label"):
            return self.pattern
        if not WORD.fullmatch(grammar.tool.name) or len(grammar.tool.name) > MAX_NAME:
            raise NoGrammar
        return grammar.literal(grammar.tool.name)


NAME, LABEL = Word("name"), Word("label")


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call, after its name; they end the call. Those in Python come all at once: an expression that is
    no literal makes all of it text."""

    notation: Notation = JSON
    comma: str = ", "  # between two values, where a grammar writes what is no JSON

    def marks(self) -> tuple[str, ...]:
        return (self.notation.arguments.open,)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if self.notation is PYTHON:
            calls.hold()
            yield from read_arguments(scan, calls.write)
        else:
            yield from read_value(scan, calls.write, self.notation, self.notation.arguments)
        calls.complete_arguments()
        calls.close()

    def lark(self, grammar: LarkGrammar) -> str:
        return grammar.arguments() if self.notation is JSON else arguments(grammar, self.notation, self.comma)


@dataclass(frozen=True)
class JsonCall:
    """A JSON object with the function's name and its arguments, in any order. A strict one has no other keys than
    these and an id: where no marker stands before it, it may as well be an answer in JSON. `compact`: models write no
    space after its commas and colons."""

    name: str = "name"
    arguments: str = "arguments"
    strict: bool = False
    index_key: str = ""  # the key of the call's number, where a model writes one
    compact: bool = False

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
        if calls.has_no_arguments and not self.strict:
            calls.write("{")
            calls.write("}")
            calls.complete_arguments()
        calls.close()

    def _value(self, key: str, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if key == self.name:
            calls.set_name(json.loads(f'"{(yield from read_name(scan, JSON))}"', strict=False))
        elif key in (self.arguments, "arguments", "parameters"):
            yield from self._arguments(scan, calls)
        elif self.strict and key not in ("id", "type"):
            raise MalformedText
        else:
            yield from read_value(scan, lambda text: None, JSON)

    def _arguments(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        """An object; nothing at all; or a string that holds an object, as some models write it."""
        if not calls.has_no_arguments:
            raise MalformedText
        if (yield from scan.skip("null")):
            calls.write("{")
            calls.write("}")
        elif (yield from scan.peek_marker(('"',))):
            inner = yield from read_name(scan, JSON)
            text = to_json(json.loads(f'"{inner}"', strict=False), JSON, JSON.arguments)
            if text is None:
                raise MalformedText
            calls.write(text[:1])
            calls.write(text[1:])
        else:
            yield from read_value(scan, calls.write, JSON, JSON.arguments)
        calls.complete_arguments()

    def lark(self, grammar: LarkGrammar) -> str:
        name = json.dumps(grammar.tool.name, ensure_ascii=False)
        number = f'{{"{self.index_key}": "' if self.index_key else ""
        head = ('", ' if number else "{") + f'"{self.name}": {name}, "{self.arguments}": '
        head = head.replace('": ', '":').replace('", ', '",') if self.compact else head
        before = f"{grammar.literal(number)} /[0-9]{{1,3}}/" if number else ""
        return f"{before} {grammar.literal(head)} {grammar.arguments()} {grammar.literal('}')}"


@dataclass(frozen=True)
class OneOrMore:
    """One or more of a sequence, with something between them. `may_trail`: the part behind does not begin with that,
    so a grammar allows it there too, if it is space."""

    sequence: tuple[FormatPart, ...]
    separator: str = ""
    may_trail: bool = False

    def marks(self) -> tuple[str, ...]:
        return self.sequence[0].marks()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        more = True
        while more:
            yield from read_all(self.sequence, scan, calls)
            if mark := self.separator.strip():
                more = bool((yield from scan.skip(mark)))
            else:
                more = yield from starts_here(self.sequence[0], scan)

    def lark(self, grammar: LarkGrammar) -> str:
        """Joins `between` and the marker after it into one literal where `between` may also begin the end's marker."""
        first, rest = self.sequence[0], self.sequence[1:]
        after = trailing(grammar, self.separator) if self.may_trail else ""
        if after or not isinstance(first, Marker):
            return grammar.repeated("", grammar.sequence(self.sequence), grammar.literal(self.separator), after)
        between = grammar.literal(self.separator + first.text)
        return grammar.repeated(grammar.literal(first.text), grammar.sequence(rest), between, after)


@dataclass(frozen=True)
class OptionalPart:
    """A sequence that need not be there. `written`: whether the model writes it, where that is known."""

    sequence: tuple[FormatPart, ...]
    written: bool | None = None

    def marks(self) -> tuple[str, ...]:
        return self.sequence[0].marks()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        if (yield from starts_here(self.sequence[0], scan)):
            yield from read_all(self.sequence, scan, calls)

    def lark(self, grammar: LarkGrammar) -> str:
        if self.written is None:
            return f"({grammar.sequence(self.sequence)})?"
        return grammar.sequence(self.sequence) if self.written else NOTHING


@dataclass(frozen=True)
class Alternatives:
    """The first of several sequences that begins here. `written`: how many of them a grammar has."""

    sequences: tuple[tuple[FormatPart, ...], ...]
    written: int | None = None

    def marks(self) -> tuple[str, ...]:
        return tuple(mark for sequence in self.sequences for mark in sequence[0].marks())

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        for sequence in self.sequences:
            if (yield from starts_here(sequence[0], scan)):
                yield from read_all(sequence, scan, calls)
                return
        raise MalformedText

    def lark(self, grammar: LarkGrammar) -> str:
        return "(" + " | ".join(grammar.sequence(sequence) for sequence in self.sequences[: self.written]) + ")"


def one_or_more(*described: str | FormatPart, between: str = "") -> OneOrMore:
    return OneOrMore(parts(*described), between)


def optional(*described: str | FormatPart, written: bool | None = None) -> OptionalPart:
    return OptionalPart(parts(*described), written)


def alternatives(*described: tuple[str | FormatPart, ...], written: int | None = None) -> Alternatives:
    return Alternatives(tuple(parts(*each) for each in described), written)
