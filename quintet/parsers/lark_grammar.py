"""Writes what a format says as a grammar in llguidance's Lark: all that it admits is read back as complete calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintet.parsers.events import Tool
from quintet.parsers.schema import with_bounded_whitespace

if TYPE_CHECKING:
    from quintet.parsers.combinators import FormatPart

TEXT = r"/(?s:.*)/"
JSON_NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+\-]?[0-9]{1,2})?/"
# As templates write values: Python's json.dumps, and Jinja's tojson.
JSON_DUMPS_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NOTHING = '""'
GAP = r"/[ \n]{0,4}/"

_OF_OBJECTS = frozenset({
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
    "default", "examples", "$schema", "$id", "$comment", "strict",
})  # fmt: skip


class NoGrammar(Exception):
    """The format cannot be written as a grammar."""


class _PerTool(Exception):
    """The text that is written differs from tool to tool."""


class LarkGrammar:
    """The rules of one grammar. `special`: tokens that no text can match, and their ids."""

    def __init__(self, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]) -> None:
        self._tools, self._parallel, self._special = tools, parallel, special
        self._split = re.compile(
            "|".join(re.escape(each) for each in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self._rules: list[str] = []
        self._names = 0
        self._tool: Tool | None = None

    @property
    def tool(self) -> Tool:
        """Tool of the call that is being written."""
        if self._tool is None:
            raise _PerTool
        return self._tool

    def first_special(self, text: str) -> tuple[str, str, str] | None:
        """Returns the text before the first special token in `text`, the token, and the text after it."""
        found = self._split.search(text)
        return None if found is None else (text[: found.start()], found[0], text[found.end() :])

    def literal(self, text: str) -> str:
        """A text, with the special tokens in it as tokens."""
        pieces, at = [], 0
        for found in self._split.finditer(text):
            pieces += [quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(piece for piece in [*pieces, quoted(text[at:])] if piece) or NOTHING

    def arguments(self) -> str:
        """The JSON of a call's arguments, by the tool's schema."""
        schema = json.dumps(with_bounded_whitespace({"type": "object", **self.tool.parameters}))
        return self.rule("%json " + schema.replace("::=", "\\u003a:="))  # which would say that the grammar is EBNF

    def json(self, schema: Any) -> str:
        """A value in JSON, on one line."""
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"not": {}}
        return self.rule("%json " + json.dumps({"x-guidance": JSON_DUMPS_FORMAT, **schema}).replace("::=", "\\u003a:="))

    def some(self, pieces: Sequence[tuple[str, bool]], between: str) -> str:
        """Writes all needed pieces and any of the others, in their order."""
        firsts, rest = list[str](), ""
        for piece, needed in reversed(pieces):
            if needed:
                firsts.clear()
            firsts.append(f"{piece} {rest}")
            rest = self.rule(f"{between} {piece} {rest}" if needed else f"({between} {piece})? {rest}")
        needed = any(needed for _, needed in pieces)
        return f"({' | '.join([*firsts, *([] if needed else [NOTHING])])})"

    def until(self, expression: str, end: str) -> str:
        """A text (a terminal's expression) that does not hold the marker, and the marker with the space around it."""
        text = f"({expression}) & ~({TEXT} {quoted(end.strip())} {TEXT})"
        found = self.first_special(end)
        if found is None:
            return self.rule(self.terminal(f"({text}) {quoted(end)}"), "[lazy]")
        before, token, after = found
        return f"{self.terminal(f'({text}) {quoted(before)}')} {self.literal(token + after)}"

    def sequence(self, parts: "tuple[FormatPart, ...]") -> str:
        """Parts in their order; once for each tool, where they speak of one."""
        try:
            return " ".join(part.lark(self) for part in parts)
        except _PerTool:
            written = []
        for tool in self._tools:
            self._tool = tool
            written.append(self.rule(" ".join(part.lark(self) for part in parts)))
        self._tool = None
        return "(" + " | ".join(written) + ")"

    def repeated(self, before: str, body: str, between: str, after: str = "") -> str:
        """Writes `body` once, or any number of times if parallel calls are allowed. `after` may follow the last."""
        if not self._parallel:
            return f"{before} {body}"
        rule = self.rule(body)
        return f"{before} {rule} ({between} {rule})*" + (f" ({after})?" if after else "")

    def with_reasoning(self, opens: str, closes: Sequence[str], inside: bool, what: str) -> str:
        """The whole grammar, with what the model thinks before, if it is to think; any of `closes` ends that."""
        start = what
        if closes:
            thought, opened = self._thought(closes), self.literal(opens)
            if not inside:
                start = f"({opened} {thought} {GAP})? {what}"
            elif opened.startswith("<["):  # which the thought's text cannot match, and the model may say all the same
                start = f"({opened})? {thought} {GAP} {what}"
            else:
                start = f"{thought} {GAP} {what}"
        return self.text(start)

    def text(self, start: str) -> str:
        """The grammar's text."""
        return "\n".join([f"start: {start}", *self._rules])

    def _thought(self, closes: Sequence[str]) -> str:
        """Any text and its end. Where that is a token, the text does not hold what would be read as one."""
        written = [self.literal(each) for each in closes]
        texts = " | ".join(map(quoted, closes))
        tokens = [each for each in written if each.startswith("<[")]
        if tokens:
            self._rules.append(f"FREE: {TEXT} & ~({TEXT} ({texts}) {TEXT})")
            return f"FREE ({' | '.join(tokens)})"
        self._rules.append(f"thought[lazy]: {TEXT} ({texts})")
        return "thought"

    def rule(self, body: str, attributes: str = "") -> str:
        name = self.reserve()
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = self.reserve().upper()
        self._rules.append(f"{name}: {body}")
        return name

    def reserve(self) -> str:
        """A name for a rule that is written later."""
        self._names += 1
        return f"r{self._names}"

    def define(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")


def trailing(lark: LarkGrammar, separator: str) -> str:
    """Returns the separator where models also write it after the last call: as space; empty for a comma."""
    return lark.literal(separator) if separator.isspace() else ""


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """(name, schema, whether it must be there) of each property; None for an object that may have any."""
    if not schema.keys() <= _OF_OBJECTS:
        raise NoGrammar
    declared, needed = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(declared, Mapping) or not isinstance(needed, list):
        raise NoGrammar
    if not all(isinstance(each, str) and each in declared for each in needed):
        raise NoGrammar
    if not declared and schema.get("additionalProperties") in (None, True, {}):
        return None
    return [(name, each, name in needed) for name, each in declared.items() if each is not False]
