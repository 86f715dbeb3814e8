"""EBNF as llama.cpp and xgrammar write it (`name ::= ...`, from `root`), as a Lark grammar for llguidance."""

import json
import re
from collections.abc import Mapping

MAX_DEPTH = 100  # of brackets within one another
MAX_CODE_POINT = 0x10FFFF

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<rule>[^\W\d][\w-]*|\d[\w-]*)[ \t]*::=
    |(?P<name>[\w-]+)
    |(?P<string>"(?:\\.|[^"\\\r\n])*")
    |(?P<class>\[(?:\\.|[^\]\\\r\n])*\])
    |(?P<repeat>\{[ \t]*\d*[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "e": "\x1b"}
_LITERAL = frozenset("\"'\\/[](){}^$-.?*+|@#&~<>=!,:;%` ")  # what a backslash before it stands for


def lark_from_ebnf(grammar: str) -> str:
    """Returns the grammar in Lark, whose rule `start` is `root`. ValueError says what is wrong, and in which line."""
    return _Parser(grammar).written()


class _Parser:
    """Reads one grammar. Each rule gets a name of its own in Lark; one made of texts and classes alone is a terminal,
    which is matched a thousand times faster than a rule."""

    def __init__(self, grammar: str) -> None:
        self._tokens = list(_tokens(grammar))
        self._at = 0
        parts: dict[str, set[str]] = {}  # rules, and those they name
        named = set[str]()
        for kind, text, _ in self._tokens:
            if kind == "rule":
                named = parts.setdefault(text, set())
            elif kind == "name":
                named.add(text)
        terminals = _terminals(parts)
        names = {name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(parts)}
        self._names = names

    def written(self) -> str:
        """Returns all rules in Lark."""
        if "root" not in self._names:
            raise ValueError("the grammar has no rule `root`, with which it begins")
        rules: dict[str, str] = {}
        while self._at < len(self._tokens):
            kind, name, line = self._next()
            if kind != "rule":
                raise ValueError(f"line {line}: {name!r} stands where a rule (name ::= ...) should begin")
            if name in rules:
                raise ValueError(f"line {line}: there is another rule {name!r}")
            rules[name] = self._choice(0)
        # a root of texts and classes alone is one terminal: its parts may then overlap, as [a-z]+ before "b" does
        written = [f"start: {self._names['root']}"]
        return "\n".join([*written, *(f"{self._names[name]}: {body}" for name, body in rules.items())])

    def _choice(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError(f"brackets may be nested {MAX_DEPTH} deep")
        sequences = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            sequences.append(self._sequence(depth))
        return " | ".join(sequences)

    def _sequence(self, depth: int) -> str:
        items = list[str]()
        while (item := self._item(depth)) is not None:
            items.append(self._repeated(item))
        return " ".join(items) or '""'

    def _item(self, depth: int) -> str | None:
        """One element; None where the sequence ends."""
        if self._at == len(self._tokens) or self._tokens[self._at][0] == "rule" or self._peek() in ("|", ")"):
            return None
        kind, text, line = self._next()
        if kind == "name":
            if text not in self._names:
                raise ValueError(f"line {line}: there is no rule {text!r}")
            return self._names[text]
        if kind == "string":
            return json.dumps("".join(_characters(text[1:-1], line)), ensure_ascii=False)
        if kind == "class":
            return _class(text, line)
        if text == ".":
            return "/(?s:.)/"
        if text != "(":
            raise ValueError(f"line {line}: {text!r} has nothing before it to repeat")
        inner = self._choice(depth + 1)
        if self._peek() != ")":
            raise ValueError(f"line {line}: a bracket is not closed")
        self._at += 1
        return f"({inner})"

    def _repeated(self, item: str) -> str:
        while self._at < len(self._tokens):
            kind, text, line = self._tokens[self._at]
            if kind == "repeat":
                item = f"({item}){_bounds(text, line)}"
            elif text in ("*", "+", "?") and kind == "sign":
                item = f"({item}){text}"
            else:
                break
            self._at += 1
        return item

    def _peek(self) -> str:
        """The next sign; empty if something else is next."""
        kind, text, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", 0)
        return text if kind == "sign" else ""

    def _next(self) -> tuple[str, str, int]:
        token = self._tokens[self._at]
        self._at += 1
        return token


def _terminals(parts: Mapping[str, set[str]]) -> set[str]:
    """Returns the rules that name none but such rules."""
    found = set[str]()
    while more := {name for name, named in parts.items() if name not in found and named <= found}:
        found |= more
    return found


def _tokens(grammar: str) -> "list[tuple[str, str, int]]":
    """(kind, text, line) of all but space and comments."""
    found, at, line = [], 0, 1
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"line {line}: the grammar cannot be read at {grammar[at : at + 20]!r}")
        if match.lastgroup != "space":
            found.append((match.lastgroup, match[match.lastgroup], line))
        line += match[0].count("\n")
        at = match.end()
    return found


def _bounds(text: str, line: int) -> str:
    low, comma, high = text[1:-1].replace(" ", "").replace("\t", "").partition(",")
    if not low and not high:
        raise ValueError(f"line {line}: {text!r} needs a number")
    if high and int(high) < int(low or 0):
        raise ValueError(f"line {line}: {text!r} ends before it begins")
    return f"{{{low or 0}{comma}{high}}}"


def _characters(text: str, line: int) -> list[str]:
    """The characters that a string or a class is written with, escapes read."""
    found = []
    for match in _ESCAPE.finditer(text):
        code, escaped = match[1] or match[2] or match[3], match[4]
        if code is not None and int(code, 16) > MAX_CODE_POINT or code and 0xD800 <= int(code, 16) < 0xE000:
            raise ValueError(f"line {line}: {match[0]!r} is no character")
        if code is not None:
            found.append(chr(int(code, 16)))
        elif escaped is None:
            found.append(match[5])
        elif escaped in _LITERAL:
            found.append(escaped)
        elif escaped in _CONTROLS:
            found.append(_CONTROLS[escaped])
        else:
            raise ValueError(f"line {line}: there is no escape {match[0]!r}; a backslash itself is \\\\")
    return found


def _class(text: str, line: int) -> str:
    """A class of characters, as a regular expression."""
    inner = text[1:-1]
    negated = inner.startswith("^")
    inner = inner[negated:]
    pieces = [match[0] for match in _ESCAPE.finditer(inner)]
    characters = _characters(inner, line)
    ranges, at = list[str](), 0
    while at < len(pieces):
        if at + 2 < len(pieces) and pieces[at + 1] == "-":
            if characters[at] > characters[at + 2]:
                raise ValueError(f"line {line}: the range {pieces[at]}-{pieces[at + 2]} ends before it begins")
            ranges.append(f"{_code(characters[at])}-{_code(characters[at + 2])}")
            at += 3
        else:
            ranges.append(_code(characters[at]))
            at += 1
    if not ranges:
        return "/(?s:.)/" if negated else "/[^\\x00-\\U0010FFFF]/"
    return f"/[{'^' if negated else ''}{''.join(ranges)}]/"


def _code(character: str) -> str:
    """A character as a regular expression writes it in a class."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{ord(character):04X}" if ord(character) < 0x10000 else f"\\U{ord(character):08X}"


def named_tokens(lark: str, added: Mapping[str, int]) -> str:
    """Returns a Lark grammar in which added tokens (`<think>`) are written by their ids (`<[8]>`)."""
    found = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|<[^\s<>\[\]"/]+>')
    return found.sub(lambda match: f"<[{added[match[0]]}]>" if match[0] in added else match[0], lark)
