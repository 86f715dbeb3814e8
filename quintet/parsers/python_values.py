"""Reads Python's literals, as models write arguments: what `ast.literal_eval` takes and JSON can hold, as JSON text.

Not Python's own parser: its memory and stack grow with what a model writes.
"""

import itertools
import json
import math
import re
import unicodedata

from quintet.parsers.scanner import MalformedText, Scanner, Steps, pattern_without
from quintet.parsers.value_reader import (
    DIGITS,
    MAX_DEPTH,
    MAX_NAME,
    MAX_SCALAR,
    NUMBER,
    PYTHON,
    SCALAR,
    WORD,
    Write,
    json_escaped,
    read_escape,
    read_string,
)

# A prefix of a string that is text, with its quote. Bytes and f-strings are no JSON.
STARTS = tuple(map("".join, itertools.product(("", "r", "R", "u", "U"), ("'''", '"""', "'", '"'))))
INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*)")
FLOAT = re.compile(r"[+-]?([0-9][0-9_]*)?\.?([0-9][0-9_]*)?([eE][+-]?[0-9_]+)?")
OCTAL = re.compile(r"[0-7]{1,3}")
LINE = pattern_without("\n")
SIMPLE = {each: "\\" + each for each in '"\\bfnrt'} | {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b"}


def read_arguments(scan: Scanner, write: Write) -> Steps[None]:
    """The brackets of a call and the keywords in them, as a JSON object."""
    yield from scan.expect("(")
    write("{")
    before, names = "", set[str]()
    while not (yield from _skip(scan, ")")):
        name = yield from scan.run(WORD, MAX_NAME)
        if not name or name in names or not (yield from _skip(scan, "=")):
            raise MalformedText
        names.add(name)
        write(f'{before}"{json_escaped(name)}": {(yield from _value(scan))}')
        before = ", "
        yield from _comma_or(scan, ")")
    write("}")


def literal_to_json(text: str) -> str | None:
    """The JSON of a whole text; None if it is not one literal."""
    scan, value = Scanner(text, ended=True), ""

    def read() -> Steps[None]:
        nonlocal value
        value = yield from _value(scan)
        yield from _space(scan)

    try:
        for _ in read():
            pass
    except MalformedText:
        return None
    return None if scan.rest() else value


def _space(scan: Scanner) -> Steps[None]:
    """Takes space and comments."""
    yield from scan.space()
    while (yield from scan.peek(1)) == "#":
        while True:
            scan.match(LINE)
            if not scan.empty() or scan.ended:
                break
            yield
        yield from scan.space()


def _skip(scan: Scanner, *marks: str) -> Steps[str]:
    yield from _space(scan)
    return (yield from scan.skip(*marks))


def _comma_or(scan: Scanner, close: str) -> Steps[bool]:
    """Takes a comma -> True; False before the closing bracket, which is not taken."""
    if (yield from _skip(scan, ",")):
        return True
    if not (yield from scan.peek_marker((close,))):
        raise MalformedText
    return False


def _value(scan: Scanner, depth: int = 0) -> Steps[str]:
    """One literal -> its JSON."""
    yield from _space(scan)
    if (yield from scan.peek_marker(STARTS)):
        return (yield from _strings(scan))
    opened = yield from scan.skip("[", "(", "{")
    if not opened:
        return _scalar((yield from scan.run(SCALAR, MAX_SCALAR)))
    if depth == MAX_DEPTH:
        raise MalformedText
    if opened == "{":
        return (yield from _dict(scan, depth + 1))
    return (yield from _list(scan, {"[": "]", "(": ")"}[opened], depth + 1))


def _list(scan: Scanner, close: str, depth: int) -> Steps[str]:
    """The rest of a list or a tuple. Brackets around one value are just that, without a comma."""
    items: list[str] = []
    comma = False
    while not (yield from _skip(scan, close)):
        items.append((yield from _value(scan, depth)))
        comma = yield from _comma_or(scan, close)
    return items[0] if close == ")" and len(items) == 1 and not comma else f"[{', '.join(items)}]"


def _dict(scan: Scanner, depth: int) -> Steps[str]:
    """The rest of a dict. Its keys become text, as `json.dumps` writes them."""
    pairs: list[str] = []
    while not (yield from _skip(scan, "}")):
        key = yield from _value(scan, depth)
        if key[0] in "[{" or not (yield from _skip(scan, ":")):
            raise MalformedText
        key = key if key[0] == '"' else f'"{key}"'
        pairs.append(f"{key}: {(yield from _value(scan, depth))}")
        yield from _comma_or(scan, "}")
    return "{" + ", ".join(pairs) + "}"


def _scalar(word: str) -> str:
    if word in PYTHON.words:
        return PYTHON.words[word]
    if NUMBER.fullmatch(word):
        return word
    try:
        if INTEGER.fullmatch(word):
            return str(int(word, 0))
        if FLOAT.fullmatch(word) and math.isfinite(value := float(word)):
            return json.dumps(value)
    except ValueError:
        pass
    raise MalformedText


def _strings(scan: Scanner) -> Steps[str]:
    """One string, or several beside one another, which are one -> its JSON."""
    pieces = ['"']
    while start := (yield from scan.peek_marker(STARTS)):
        scan.take(len(start))
        yield from read_string(scan, pieces.append, start.lstrip("rRuU"), _raw if start[0] in "rR" else _escape)
        yield from _space(scan)
    return "".join([*pieces, '"'])


def _raw(scan: Scanner, write: Write) -> Steps[None]:
    """A backslash in a raw string, and the character after it."""
    write(json_escaped(scan.take(len((yield from scan.peek(2))))))


def _escape(scan: Scanner, write: Write) -> Steps[None]:
    """A backslash and what it says. One that says nothing stands for itself."""
    kind = (yield from scan.peek(2))[1:]
    if kind in DIGITS:
        yield from read_escape(scan, write)
    elif octal := OCTAL.match((yield from scan.peek(4))[1:]):
        scan.take(1 + octal.end())
        write(json_escaped(chr(int(octal[0], 8))))
    elif kind == "N":
        yield from _named(scan, write)
    elif not kind:
        raise MalformedText
    else:
        scan.take(2)
        write(SIMPLE.get(kind, "\\\\" + json_escaped(kind)))


def _named(scan: Scanner, write: Write) -> Steps[None]:
    """A character by its name in Unicode."""
    scan.take(2)
    pieces: list[str] = []
    yield from scan.until(("}",), pieces.append, 100)
    try:
        write(json_escaped(unicodedata.lookup("".join(pieces).removeprefix("{"))))
    except KeyError:
        raise MalformedText from None
