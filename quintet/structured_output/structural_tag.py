"""Structural tags: free text in which tagged stretches have a shape, as xgrammar's users write them, as a Lark grammar.

Both forms are read: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"format": ...} with pieces
that have a `type` (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quintet.parsers.schema import with_bounded_whitespace
from quintet.structured_output.ebnf import lark_from_ebnf, named_tokens

MAX_PIECES = 4096  # of one structural tag
MAX_SIZE = 2**20  # characters of a grammar

_RULE = re.compile(r"[ \t]*[\w-]+[ \t]*::=")  # as EBNF begins one
_SLASH = re.compile(r"\\.|/", re.DOTALL)  # one that is escaped already stays so
_TEXT = "TEXT: /(.|\\n)*/"


def structural_lark(tag: Any, special: Mapping[str, int] | None = None) -> str:
    """Returns the grammar; its rule `start` is the whole output. `special`: tokens that no text matches, and their ids:
    what a tag begins or ends with may be one. ValueError says which piece is wrong."""
    if not isinstance(tag, Mapping):
        raise ValueError("structural_tag must be an object")
    return _Grammar(special or {}).written(_format(tag))


def as_lark(grammar: str, added: Mapping[str, int] | None = None) -> str:
    """A grammar in Lark's form, or in the EBNF that llama.cpp and xgrammar take (its rules have "::="), in Lark's.
    `added`: the tokenizer's added tokens, which Lark's form may name (`<think>`), and their ids."""
    if len(grammar) > MAX_SIZE:
        raise ValueError(f"a grammar may have {MAX_SIZE} characters, not {len(grammar)}")
    return lark_from_ebnf(grammar) if is_ebnf(grammar) else named_tokens(grammar, added or {})


def is_ebnf(grammar: str) -> bool:
    """Returns whether a line begins with a rule of EBNF; else the grammar is Lark's."""
    return any(_RULE.match(line) for line in grammar.splitlines())


def _format(tag: Mapping[str, Any]) -> Any:
    if "format" in tag:
        return tag["format"]
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("structural_tag needs `format`, or `structures` and `triggers`, which are lists")
    if not all(isinstance(each, Mapping) for each in structures):
        raise ValueError("structures holds objects with `begin`, `schema` and `end`")
    tags = [
        {"begin": each.get("begin"), "content": {"type": "json_schema", "json_schema": each.get("schema")},
         "end": each.get("end")}
        for each in structures
    ]  # fmt: skip
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Grammar:
    """Writes one rule for each piece, and gives its name."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._rules: list[str] = []
        self._special = special
        self._pieces: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda piece, where: _quoted(piece.get("value"), f"{where}.value"),
            "json_schema": lambda piece, where: _schema(piece.get("json_schema"), f"{where}.json_schema"),
            "regex": lambda piece, where: _regex(piece.get("pattern"), f"{where}.pattern"),
            "grammar": self._lark,
            "any_text": self._text,
            "sequence": lambda piece, where: " ".join(self._elements(piece, where)),
            "or": lambda piece, where: " | ".join(self._elements(piece, where)),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def written(self, piece: Any) -> str:
        start = self._rule(piece, "format")
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, _TEXT])

    def _add(self, body: str, attributes: str = "") -> str:
        if len(self._rules) >= MAX_PIECES:
            raise ValueError(f"structural_tag may have {MAX_PIECES} pieces")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _rule(self, piece: Any, where: str) -> str:
        if not isinstance(piece, Mapping) or not isinstance(piece.get("type"), str):
            raise ValueError(f"{where} must be an object with a `type`")
        write = self._pieces.get(piece["type"])
        if write is None:
            raise ValueError(f"{where}.type {piece['type'][:40]!r} is not served; there are {', '.join(self._pieces)}")
        return self._add(write(piece, where))

    def _elements(self, piece: Mapping[str, Any], where: str) -> list[str]:
        elements = _list(piece, "elements", where)
        return [self._rule(each, f"{where}.elements[{index}]") for index, each in enumerate(elements)]

    def _text(self, piece: Mapping[str, Any], where: str) -> str:
        if piece.get("excludes"):
            raise ValueError(f"{where}.excludes is not served")
        return "TEXT"

    def _lark(self, piece: Mapping[str, Any], where: str) -> str:
        given = piece.get("grammar")
        if not isinstance(given, str):
            raise ValueError(f"{where}.grammar must be text")
        return f"%lark {{\n{as_lark(given)}\n}}"

    def _tag(self, piece: Mapping[str, Any], where: str) -> str:
        return f"{self._marker(piece.get('begin'), f'{where}.begin')} {self._rest(piece, where)}"

    def _token(self, text: str) -> str:
        """A text that begins with a special token, with that as a token; empty if it begins with none."""
        found = max((each for each in self._special if text.startswith(each)), key=len, default=None)
        return "" if found is None else f"<[{self._special[found]}]> {_literal(text[len(found) :])}"

    def _marker(self, text: Any, where: str) -> str:
        """A text, out of letters or with the special token that it begins with."""
        quoted = _quoted(text, where)
        token = self._token(text)
        return f"({quoted} | {token})" if token else quoted

    def _rest(self, piece: Mapping[str, Any], where: str) -> str:
        """A tag behind its begin. Text is as short as its end allows."""
        content, ends = piece.get("content"), piece.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            if len(ends) != 1 or not ends[0]:
                raise ValueError(f"{where}.end must be one text behind any_text")
            return self._add("/(.|\\n)*/", f"[suffix={_quoted(ends[0], f'{where}.end')}]")
        quoted = [self._marker(end, f"{where}.end") if end != "" else "" for end in ends]
        closing = f"({' | '.join(quoted)})" if len(quoted) > 1 else quoted[0]
        return f"{self._rule(content, f'{where}.content')} {closing}"

    def _triggered(self, piece: Mapping[str, Any], where: str) -> str:
        """Text in which a trigger must go on as one of its tags. With at_least_one, it begins with a tag."""
        triggers, tags = _list(piece, "triggers", where), _list(piece, "tags", where)
        found: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            at = f"{where}.tags[{index}]"
            begin = tag.get("begin") if isinstance(tag, Mapping) else None
            trigger = next((t for t in triggers if _begins(begin, t)), None)
            if trigger is None or begin is None:
                raise ValueError(f"{at}.begin must start with one of the triggers")
            found.setdefault(trigger, []).append(f"{_literal(begin[len(trigger) :])} {self._rest(tag, at)}")
        rests = {trigger: self._add(" | ".join(each)) for trigger, each in found.items()}
        called = [f"{self._add(f'TEXT {_literal(trigger)}', '[lazy]')} {rest}" for trigger, rest in rests.items()]
        tokens = ((self._token(trigger), rest) for trigger, rest in rests.items())
        called += [f"TEXT {token} {rest}" for token, rest in tokens if token]
        anywhere = self._add(" | ".join(called))
        first = self._add(" | ".join(f"{self._marker(trigger, where)} {rest}" for trigger, rest in rests.items()))
        if piece.get("stop_after_first"):
            return first if piece.get("at_least_one") else f"{anywhere} | TEXT"
        return f"{first if piece.get('at_least_one') else ''} {anywhere}* TEXT"

    def _separated(self, piece: Mapping[str, Any], where: str) -> str:
        tags = [self._rule({"type": "tag", **tag} if isinstance(tag, Mapping) else tag, f"{where}.tags[{index}]")
                for index, tag in enumerate(_list(piece, "tags", where))]  # fmt: skip
        one = self._add(" | ".join(tags))
        separator = piece.get("separator")
        between = _quoted(separator, f"{where}.separator") if separator != "" else ""
        all_of_them = one if piece.get("stop_after_first") else f"{one} ({between} {one})*"
        return all_of_them if piece.get("at_least_one") else f"({all_of_them})?"


def _begins(begin: Any, trigger: Any) -> bool:
    return isinstance(begin, str) and isinstance(trigger, str) and bool(trigger) and begin.startswith(trigger)


def _list(piece: Mapping[str, Any], name: str, where: str) -> list[Any]:
    found = piece.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}.{name} must be a list that is not empty")
    return found


def _quoted(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where} must be text that is not empty")
    return _literal(text)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _schema(schema: Any, where: str) -> str:
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"{where} must be a JSON schema")
    if schema is True:
        schema = {}
    return f"%json {json.dumps(schema if schema is False else with_bounded_whitespace(schema))}"


def _regex(pattern: Any, where: str) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{where} must be text that is not empty")
    escaped = _SLASH.sub(lambda match: match[0] if len(match[0]) > 1 else "\\/", pattern)
    return "/" + escaped.replace("\n", "\\n") + "/"
