"""Values by their schema as a grammar, where they are no JSON: bare text up to a marker, Python, Gemma's notation."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quintet.parsers.lark_grammar import JSON_NUMBER, LarkGrammar, NoGrammar, properties, quoted
from quintet.parsers.schema import ANY, TYPES, as_json
from quintet.parsers.schema import TEXT as ONLY_TEXT
from quintet.parsers.schema_types import Option, count_of, options, text_of, with_definitions
from quintet.parsers.value_reader import MAX_NAME, PYTHON, WORD, Bracket, Notation

SPACE = r"/[\s\x1c-\x1f]*/"
ANY_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?/"
SCALARS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,18})/",
    "number": JSON_NUMBER,
}
SINGLE, UNESCAPED = '"\'"', r"/[^'\\\x00-\x1f]*/"
# What a text must not look like where it may also be a value of that type: it would be read as that.
MAX_LOOKUPS = {
    "null": "/(?i:null|none)/",
    "boolean": "/(?i:true|false)/",
    "integer": ANY_NUMBER,
    "number": ANY_NUMBER,
    "array": r"/[\[(](?s:.*)/",
    "object": r"/\{(?s:.*)/",
}
NO_TEXT = sorted(ANY)
FREE_NAME = r"/[a-zA-Z_][a-zA-Z0-9_]{0,63}/"  # of an undeclared argument


def until_marker(lark: LarkGrammar, schema: Any, allowed: frozenset[str], end: str) -> str:
    """A value as bare text, and the marker that ends it. `allowed`: the types as which the reader takes it."""
    kinds = {*allowed, "any", *(["integer"] if "number" in allowed else [])}
    found = [each for each in options(schema, lark.tool.parameters) if _type(each) in kinds]
    texts = [text_of(each) for kind, each in found if kind == "string" or (kind == "any" and allowed == ONLY_TEXT)]
    looks = [MAX_LOOKUPS[each] for each in sorted(allowed) if each in MAX_LOOKUPS]
    if looks:
        texts = [f"({each}) & ~({SPACE} ({' | '.join(looks)}) {SPACE})" for each in texts]
    plain = [quoted(text) for text in _constants(found, allowed) if text]
    others = [(kind, each) for kind, each in found if kind not in ("const", "any", "string")]
    if not texts and any(kind == "any" for kind, _ in found):
        others += [(kind, {}) for kind in sorted(allowed - ONLY_TEXT)]
    if texts or plain:  # what is no text must be distinguishable from it before either ends
        plain += [SCALARS[kind] for kind, each in others if kind in SCALARS and not _bounded(each)]
        others = [(kind, each) for kind, each in others if kind not in SCALARS]
    written = [lark.until(" | ".join(f"({each})" for each in [*texts, *plain]), end)] if texts or plain else []
    if others:
        shapes = {"anyOf": [{**each, "type": kind} for kind, each in others]}
        written.append(f"{lark.json(with_definitions(shapes, lark.tool.parameters))} {lark.literal(end)}")
    if not written:
        raise NoGrammar
    return f"({' | '.join(written)})"


def _constants(found: list[Option], allowed: frozenset[str]) -> Iterator[str]:
    """Those that are read back as themselves."""
    for kind, each in found:
        if kind == "const":
            value = each["const"]
            text = value if isinstance(value, str) else _json_pattern(value)
            read = _json_pattern(text) if allowed == ONLY_TEXT else as_json(text, allowed)
            if read == _json_pattern(value):
                yield text


def _type(option: Option) -> str:
    kind, schema = option
    return TYPES.get(type(schema["const"]), "array") if kind == "const" else kind


def _bounded(schema: Mapping[str, Any]) -> bool:
    return any(key in schema for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))


def _json_pattern(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def arguments(lark: LarkGrammar, notation: Notation, comma: str) -> str:
    """All arguments of the tool's call, in the notation's brackets."""
    return _ValueGrammar(lark, notation, comma).members(lark.tool.parameters, notation.arguments)


class _ValueGrammar:
    """Writes values in a notation. A schema that refers to itself is a rule that does."""

    def __init__(self, lark: LarkGrammar, notation: Notation, comma: str) -> None:
        self._lark, self._notation, self._comma = lark, notation, comma
        self._words = {json_word: word for word, json_word in notation.words.items()}
        self._rules: dict[int, str] = {}  # id of a schema, which the tool keeps -> its rule
        self._anything = ""

    def value(self, schema: Any) -> str:
        """The name of its rule."""
        if id(schema) not in self._rules:
            name = self._rules[id(schema)] = self._lark.reserve()
            self._lark.define(name, self._alternatives(schema))
        return self._rules[id(schema)]

    def _alternatives(self, schema: Any) -> str:
        try:
            found = options(schema, self._lark.tool.parameters)
            return " | ".join(self._written(kind, each) for kind, each in found)
        except NoGrammar:
            if self._notation is not PYTHON:
                raise
            return self._lark.json(with_definitions(schema, self._lark.tool.parameters))

    def _written(self, kind: str, schema: Mapping[str, Any]) -> str:
        write: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "any": lambda _: self._any(),
            "const": lambda each: self._one(each["const"]),
            "string": self._string,
            "boolean": lambda _: f"{quoted(self._words['true'])} | {quoted(self._words['false'])}",
            "null": lambda _: quoted(self._words["null"]),
            "array": self._array,
            "object": lambda each: self.members(each, next(each for each in self._notation.brackets if each.pair)),
        }
        return write[kind](schema) if kind in write else self._lark.json({**schema, "type": kind})

    def _string(self, schema: Mapping[str, Any]) -> str:
        if self._notation.escape:
            return f"{self._lark.json({**schema, 'type': 'string'})}{self._in_single_quotes(schema)}"
        quote = self._notation.quotes[0]
        return f"{self._lark.literal(quote)} {self._lark.until(text_of(schema), quote)}"

    def _in_single_quotes(self, schema: Mapping[str, Any]) -> str:
        """The other way, for text that needs no escapes."""
        try:
            plain = f"({text_of(schema)}) & {UNESCAPED}"
        except NoGrammar:
            return ""
        return " | " + self._lark.terminal(f"{SINGLE} ({plain}) {SINGLE}")

    def _one(self, value: Any) -> str:
        """A constant, in each of its ways."""
        written = self._lark.literal(self._constant(value))
        single = isinstance(value, str) and self._notation.escape and not re.search(r"['\\\x00-\x1f]", value)
        return f"""{written} | {quoted(f"'{value}'")}""" if single else written

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._notation.escape:
                return _json_pattern(value)
            quote = self._notation.quotes[0]
            if quote in value:
                raise NoGrammar
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{self._comma.join(map(self._constant, value))}]"
        if isinstance(value, dict):
            bracket = next(each for each in self._notation.brackets if each.pair)
            pairs = [self._key(key, bracket) + self._constant(each) for key, each in value.items()]
            return bracket.open + self._comma.join(pairs) + bracket.close
        return self._words.get(_json_pattern(value), _json_pattern(value))

    def _array(self, schema: Mapping[str, Any]) -> str:
        if schema.keys() & {"prefixItems", "contains", "uniqueItems", "unevaluatedItems", "additionalItems"}:
            raise NoGrammar
        low, high = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
        if high is not None and high < max(low, 1):
            if low:
                raise NoGrammar
            return '"[]"'
        item = self.value(schema.get("items", True))
        more = f"({quoted(self._comma)} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        more = "" if high == 1 else more
        return f'"[" {item} {more} "]"' + ("" if low else ' | "[]"')

    def members(self, schema: Mapping[str, Any], bracket: Bracket) -> str:
        declared = properties(schema)
        if declared is None:
            one = f"{self._free_key(bracket)} {self._any()}"
            inner = f"({one} ({quoted(self._comma)} {one})*)?"
        else:
            pieces = [
                (f"{self._lark.literal(self._key(key, bracket))} {self.value(each)}", needed)
                for key, each, needed in declared
            ]
            inner = self._lark.some(pieces, quoted(self._comma))
        return f"{quoted(bracket.open)} {inner} {quoted(bracket.close)}"

    def _pair(self, bracket: Bracket) -> str:
        return bracket.pair if bracket.bare else bracket.pair + " "

    def _key(self, key: str, bracket: Bracket) -> str:
        if not bracket.bare:
            return _json_pattern(key) + self._pair(bracket)
        if not WORD.fullmatch(key) or len(key) > MAX_NAME:
            raise NoGrammar
        return key + self._pair(bracket)

    def _free_key(self, bracket: Bracket) -> str:
        pair = quoted(self._pair(bracket))
        return f"{FREE_NAME} {pair}" if bracket.bare else f'"\\"" {FREE_NAME} "\\"" {pair}'

    def _any(self) -> str:
        """Any value; where the notation takes JSON, that."""
        if not self._anything:
            self._anything = self._lark.reserve()
            words = " | ".join(map(quoted, self._words.values()))
            python = f"{self._string({})} | {self._lark.json({'type': NO_TEXT})} | {words}"
            self._lark.define(self._anything, python if self._notation.escape else self._any_in_notation())
        return self._anything

    def _any_in_notation(self) -> str:
        bracket = next(each for each in self._notation.brackets if each.pair)
        more, one = quoted(self._comma), f"{self._free_key(bracket)} {self._anything}"
        words = " | ".join(quoted(word) for word in self._notation.words)
        listed = f'"[" ({self._anything} ({more} {self._anything})*)? "]"'
        mapped = f"{quoted(bracket.open)} ({one} ({more} {one})*)? {quoted(bracket.close)}"
        return f"{self._string({})} | {JSON_NUMBER} | {words} | {listed} | {mapped}"
