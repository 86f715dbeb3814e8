"""Writes what a format says as a grammar in llguidance's Lark: all that it admits is read back as complete calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quintet.parsers.events import Tool

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
        schema = json.dumps({"type": "object", **self.tool.parameters})
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

    def after(self, opens: str, closes: Sequence[str], inside: bool, what: str) -> str:
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
        return "\n".join([f"start: {start}", *self._rules])

    def _thought(self, closes: Sequence[str]) -> str:
        """Any text and its end. Where that is a token, the text does not hold what would be read as one."""
        written = [self.literal(each) for each in closes]
        texts = " | ".join(map(_quoted, closes))
        tokens = [each for each in written if each.startswith("<[")]
        if tokens:
            self._rules.append(f"FREE: {ANYTHING} & ~({ANYTHING} ({texts}) {ANYTHING})")
            return f"FREE ({' | '.join(tokens)})"
        self._rules.append(f"thought[lazy]: {ANYTHING} ({texts})")
        return "thought"

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
