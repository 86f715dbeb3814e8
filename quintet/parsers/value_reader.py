"""Reads a value as a model writes it (JSON, Python, Gemma's notation) and writes it as JSON, piece by piece."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quintet.parsers.scanner import MalformedText, Scanner, Steps, pattern_without

MAX_DEPTH = 100  # lists and objects within one another
MAX_SCALAR = 512  # characters of a number
MAX_NAME = 256  # of a function's or an argument's name
WORD = re.compile(r"[\w.\-/]+")
SCALAR = re.compile(r"[\w.+\-]+")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
HEX = re.compile(r"[0-9a-fA-F]+")
DIGITS = {"u": 4, "x": 2, "U": 8}  # after such a backslash
ESCAPES = {
    **{each: "\\" + each for each in '"\\/bfnrt'},
    "'": "'",
    "\n": "",
    "0": "\\u0000",
    "a": "\\u0007",
    "v": "\\u000b",
}


Write = Callable[[str], object]
ReadEscape = Callable[[Scanner, Write], Steps[None]]


def json_escaped(text: str) -> str:
    """Inside the quotes of a JSON string."""
    return text if PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)[1:-1]


def read_escape(scan: Scanner, write: Write) -> Steps[None]:
    """A backslash and what it says: JSON's and Python's. One that says nothing stands for itself."""
    kind = (yield from scan.peek(2))[1:]
    digits = DIGITS.get(kind, 0)
    code = (yield from scan.peek(2 + digits))[2:]
    scan.take(1 + len(kind) + len(code))
    if not kind or (digits and (len(code) < digits or not HEX.fullmatch(code))):
        raise MalformedText
    if kind == "u":
        write("\\u" + code)
    elif digits:
        if int(code, 16) > 0x10FFFF:
            raise MalformedText
        write(json_escaped(chr(int(code, 16))))
    else:
        write(ESCAPES.get(kind, "\\\\" + json_escaped(kind)))


@dataclass(frozen=True)
class Bracket:
    """A list, or with `pair` (what stands between a key and its value) an object. Bare keys have no quotes."""

    open: str
    close: str
    pair: str = ""
    bare: bool = False

    @property
    def json(self) -> str:
        return "{}" if self.pair else "[]"


JSON_LIST, JSON_OBJECT = Bracket("[", "]"), Bracket("{", "}", ":")
JSON_WORDS = {"true": "true", "false": "false", "null": "null"}


@dataclass(frozen=True)
class Notation:
    """Notation of values. `arguments`: the brackets around a call's arguments. `inner`: what a quote in the middle of a
    string stands for, where there are no escapes."""

    arguments: Bracket = JSON_OBJECT
    brackets: tuple[Bracket, ...] = (JSON_LIST, JSON_OBJECT)
    quotes: tuple[str, ...] = ('"',)
    escape: ReadEscape | None = read_escape  # None: a backslash is text
    words: Mapping[str, str] = field(default_factory=lambda: JSON_WORDS)
    inner: str = ""

    @functools.cached_property
    def opens(self) -> dict[str, Bracket]:
        return {bracket.open: bracket for bracket in self.brackets}


JSON = Notation()
PYTHON = Notation(
    arguments=Bracket("(", ")", "=", bare=True),
    brackets=(JSON_LIST, Bracket("(", ")"), JSON_OBJECT),
    quotes=('"', "'"),
    words=JSON_WORDS | {"True": "true", "False": "false", "None": "null"},
)


def gemma(quote: str, inner: str) -> Notation:
    """Keys have no quotes, and strings have markers of their own."""
    braces = Bracket("{", "}", ":", bare=True)
    return Notation(arguments=braces, brackets=(JSON_LIST, braces), quotes=(quote,), escape=None, inner=inner)


def read_value(scan: Scanner, write: Write, notation: Notation, top: Bracket | None = None) -> Steps[None]:
    """One value, which must stand in the brackets `top` if they are given. Broken where it is none."""
    inside: list[Bracket] = []
    allowed = {top.open: top} if top else notation.opens
    while True:
        if opened := (yield from scan.skip(*allowed)):
            bracket = allowed[opened]
            if len(inside) == MAX_DEPTH:
                raise MalformedText
            inside.append(bracket)
            write(bracket.json[0])
            if not (yield from scan.skip(bracket.close)):
                allowed = notation.opens
                yield from _key(scan, write, notation, bracket)
                continue
            write(inside.pop().json[1])
        elif top and not inside:
            raise MalformedText
        else:
            yield from _scalar(scan, write, notation, inside[-1] if inside else None)
        if (yield from _close_brackets(scan, write, notation, inside)):
            return


def _close_brackets(scan: Scanner, write: Write, notation: Notation, inside: list[Bracket]) -> Steps[bool]:
    """After a value: brackets that close, and up to the next value -> whether there is none."""
    while inside:
        if (yield from scan.expect(",", inside[-1].close)) == ",":
            yield from _key(scan, write, notation, inside[-1], ", ")
            return False
        write(inside.pop().json[1])
    return True


def _key(scan: Scanner, write: Write, notation: Notation, bracket: Bracket, before: str = "") -> Steps[None]:
    """In an object: the next key and what stands behind it. It is written once it is known to be one."""
    if not bracket.pair:
        write(before)
        return
    key = yield from read_name(scan, notation, bracket.bare)
    yield from scan.expect(bracket.pair)
    write(f'{before}"{key}": ')


def read_name(scan: Scanner, notation: Notation, bare: bool = False) -> Steps[str]:
    """A key -> as JSON has it between its quotes."""
    yield from scan.space()
    if quote := (yield from scan.peek_marker(notation.quotes)):
        pieces: list[str] = []
        scan.take(len(quote))
        yield from read_string(scan, pieces.append, quote, notation.escape)
        return "".join(pieces)
    name = (yield from scan.run(WORD, MAX_NAME)) if bare else ""
    if not name:
        raise MalformedText
    return json_escaped(name)


def _scalar(scan: Scanner, write: Write, notation: Notation, bracket: Bracket | None) -> Steps[None]:
    if quote := (yield from scan.peek_marker(notation.quotes)):
        scan.take(len(quote))
        write('"')
        yield from read_string(scan, write, quote, notation.escape)
        while notation.inner and bracket and not (yield from _value_ends(scan, bracket, quote)):
            write(json_escaped(notation.inner))
            yield from read_string(scan, write, quote, notation.escape)
        write('"')
        return
    word = yield from scan.run(SCALAR, MAX_SCALAR)
    if word not in notation.words and not NUMBER.fullmatch(word):
        raise MalformedText
    write(notation.words.get(word, word))


def _value_ends(scan: Scanner, bracket: Bracket, quote: str) -> Steps[bool]:
    """Returns whether a value can end here: before the closing bracket, or a comma and the next key or value."""
    size = MAX_NAME + len(quote) + 8  # of a key with the comma before it; one character more at a time
    for ahead in range(1, size):
        text = yield from scan.peek(ahead)
        found = text.lstrip()
        if len(text) < ahead:
            return True  # the text has ended
        if not found:
            continue
        if found[0] != ",":
            return found[0] == bracket.close
        found = found[1:].lstrip()
        if not found or quote.startswith(found):
            continue
        if found[0] == bracket.close or not bracket.pair:
            return found.startswith(quote) or found[0] in "]{[-0123456789tfn"
        if not WORD.fullmatch(found.rstrip()):
            return found.endswith(bracket.pair) and bool(WORD.fullmatch(found[:-1].rstrip()))
    return False


def read_string(scan: Scanner, write: Write, quote: str, escape: ReadEscape | None) -> Steps[None]:
    """Reads the rest of a string after its first quote, and the last quote; writes it as JSON has it between quotes."""
    plain = pattern_without(quote[0] + ("\\" if escape else ""))
    while not (scan.empty() and scan.ended):
        if text := scan.match(plain):
            write(json_escaped(text))
        elif scan.empty():
            yield
        elif (yield from scan.peek_marker((quote,))):
            scan.take(len(quote))
            return
        elif scan.ends_within_marker((quote,)):
            raise MalformedText
        elif escape and (yield from scan.peek(1)) == "\\":
            yield from escape(scan, write)
        else:
            write(json_escaped(scan.take(1)))
    scan.starved = True
    raise MalformedText


def to_json(text: str, notation: Notation, top: Bracket | None = None) -> str | None:
    """The JSON of a whole text; None if it is not one value."""
    scan, pieces = Scanner(text, ended=True), list[str]()
    try:
        for _ in read_value(scan, pieces.append, notation, top):
            pass
    except MalformedText:
        return None
    return None if scan.rest().strip() else "".join(pieces)
