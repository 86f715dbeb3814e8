"""Writes what a format says as a grammar in llguidance's Lark: all that it admits is read back as complete calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quintet.parsers.events import Tool
from quintet.parsers.schema import bounded

if TYPE_CHECKING:
    from quintet.parsers.shapes import Part

ANYTHING = r"/(?s:.*)/"
GAP = r"/[ \n]{0,4}/"


class NoGrammar(Exception):
    """The format cannot be written as a grammar."""


class _PerTool(Exception):
    """What is written differs from tool to tool."""


class Lark:
    """The rules of one grammar. `special`: tokens that no text can match, and their ids."""

    def __init__(self, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]) -> None:
        self._tools, self._parallel, self._special = tools, parallel, special
        self._split = re.compile(
            "|".join(re.escape(each) for each in sorted(special, key=len, reverse=True)) or r"(?!)"
        )
        self._rules: list[str] = []
        self._tool: Tool | None = None

    @property
    def tool(self) -> Tool:
        """Whose call is being written."""
        if self._tool is None:
            raise _PerTool
        return self._tool

    def literal(self, text: str) -> str:
        """A text, with the special tokens in it as tokens."""
        pieces, at = [], 0
        for found in self._split.finditer(text):
            pieces += [_quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(piece for piece in [*pieces, _quoted(text[at:])] if piece) or '""'

    def arguments(self) -> str:
        """The JSON of a call's arguments, by the tool's schema."""
        schema = json.dumps(bounded({"type": "object", **self.tool.parameters}))
        return self._rule("%json " + schema.replace("::=", "\\u003a:="))  # which would say that the grammar is EBNF

    def sequence(self, parts: "tuple[Part, ...]") -> str:
        """Parts in their order; once for each tool, where they speak of one."""
        try:
            return " ".join(part.lark(self) for part in parts)
        except _PerTool:
            written = []
        for tool in self._tools:
            self._tool = tool
            written.append(self._rule(" ".join(part.lark(self) for part in parts)))
        self._tool = None
        return "(" + " | ".join(written) + ")"

    def repeated(self, body: str, between: str) -> str:
        """Once, or as often as one likes where parallel calls are allowed."""
        if not self._parallel:
            return body
        rule = self._rule(body)
        return f"{rule} ({self.literal(between) if between else ''} {rule})*"

    def after(self, opens: str, closes: str, inside: bool, calls: str) -> str:
        """The whole grammar, with what the model thinks before the calls, if it is to think."""
        start = calls
        if closes:
            close = self.literal(closes)
            thought = f"{ANYTHING} {close}" if close.startswith("<[") else self._lazy(closes)
            opened = f"{thought} {GAP}" if inside else f"({self.literal(opens)} {thought} {GAP})?"
            start = f"{opened} {calls}"
        return "\n".join([f"start: {start}", *self._rules])

    def _lazy(self, end: str) -> str:
        self._rules.append(f"thought[lazy]: {ANYTHING} {_quoted(end)}")
        return "thought"

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
