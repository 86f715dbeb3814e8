"""Arguments that stand in markers of their own, as models write XML."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.lark_grammar import LarkGrammar, NoGrammar, properties
from quintet.parsers.scanner import Scanner, Steps
from quintet.parsers.schema import TEXT, argument_types, as_json
from quintet.parsers.value_grammar import FREE_NAME, until_marker
from quintet.parsers.value_reader import MAX_NAME, json_escaped

QUOTE = re.compile(r'\\.|(")', re.DOTALL)
MAX_VALUE = 2**20  # characters of an argument that must be whole before it can be converted


@dataclass(frozen=True)
class XmlArguments:
    """Arguments that stand in markers of their own, converted by the tool's schema; `close` ends them and the call.

    `keyed` ends a name, and says which types its value may have where that is written there. A line break at the
    end of `keyed` and at the start of `end` is no part of a value.
    """

    key: str
    keyed: Mapping[str, frozenset[str] | None]
    end: str
    close: str
    value: str = ""  # stands before a value, where something does
    after: str = "\n"  # behind a field, in a grammar
    cdata: bool = False  # a value may stand in <![CDATA[ and ]]>

    def marks(self) -> tuple[str, ...]:
        return (self.key, self.close)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        calls.write("{")
        before = ""
        while (yield from scan.expect(self.key, self.close)) == self.key:
            yield from self._field(scan, calls, before)
            before = ", "
        calls.write("}")
        calls.complete_arguments()
        calls.close()

    def _field(self, scan: Scanner, calls: CallEventBuilder, before: str) -> Steps[None]:
        name: list[str] = []
        keyed = {mark.rstrip("\n"): (mark, types) for mark, types in self.keyed.items()}
        mark, types = keyed[(yield from scan.until(tuple(keyed), name.append, MAX_NAME))]
        if self.value:
            yield from scan.expect(self.value.strip())
        if mark.endswith("\n") and (yield from scan.peek_marker(("\n",))):
            scan.take(1)
        key = "".join(name).strip()
        calls.write(f'{before}"{json_escaped(key)}": ')
        yield from self._convert(scan, calls, types or calls.types(key))

    def _convert(self, scan: Scanner, calls: CallEventBuilder, types: frozenset[str]) -> Steps[None]:
        ends: tuple[str, ...] = (self.end, self.end.lstrip("\n"))
        if self.cdata and (yield from scan.peek_marker(("<![CDATA[",))):
            scan.take(len("<![CDATA["))
            ends = (f"]]>{self.end}",)
        if types == TEXT:
            calls.write('"')
            yield from scan.until(ends, lambda piece: calls.write(json_escaped(piece)))
            calls.write('"')
        else:
            calls.write(as_json((yield from self._whole(scan, ends, types)), types))

    def _whole(self, scan: Scanner, ends: tuple[str, ...], types: frozenset[str]) -> Steps[str]:
        """The text before the first end. In a string within a list or an object an end is text."""
        pieces: list[str] = []
        size, quoted = 0, False
        while True:
            start = len(pieces)
            end = yield from scan.until(ends, pieces.append, max(0, MAX_VALUE - size))
            new = "".join(pieces[start:])
            if start or (new.lstrip()[:1] in ("{", "[") and types & {"array", "object"}):
                quoted ^= sum(map(bool, QUOTE.findall(new))) % 2 == 1
            if not quoted:
                return "".join(pieces)
            pieces.append(end)
            size += len(new) + len(end)

    def lark(self, grammar: LarkGrammar) -> str:
        declared = properties(grammar.tool.parameters)
        if declared is None:
            ways = []
            for mark, types in self.keyed.items():
                value = until_marker(grammar, True, types or TEXT, self.end)
                ways.append(f"{grammar.literal(mark + self.value)} {value}")
            either = f"({' | '.join(ways)}) {grammar.literal(self.after)}"
            fields = f"({grammar.literal(self.key)} {FREE_NAME} {either})*"
        else:
            fields = grammar.some([(self._written(grammar, *each[:2]), each[2]) for each in declared], "")
        return f"{fields} {grammar.literal(self.close)}"

    def _written(self, grammar: LarkGrammar, name: str, schema: Any) -> str:
        """One field, by each of the ways in which it may be marked."""
        known = argument_types(grammar.tool.parameters, name)
        if not 0 < len(name) <= MAX_NAME or name != name.strip():
            raise NoGrammar
        ways = []
        for mark, types in self.keyed.items():
            if (name + mark).find(mark.strip()) < len(name):
                raise NoGrammar
            with contextlib.suppress(NoGrammar):
                value = until_marker(grammar, schema, types or known, self.end)
                ways.append(f"{grammar.literal(self.key + name + mark + self.value)} {value}")
        if not ways:
            raise NoGrammar
        return f"({' | '.join(ways)}) {grammar.literal(self.after)}"
