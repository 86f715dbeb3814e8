"""Arguments that stand in markers of their own, or in elements that are named after them, as models write XML."""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.lark_grammar import NOTHING, LarkGrammar, NoGrammar, properties, quoted
from quintet.parsers.scanner import MalformedText, Scanner, Steps
from quintet.parsers.schema import TEXT, argument_types, as_json, container, types
from quintet.parsers.schema_types import Option, count_of, options
from quintet.parsers.value_grammar import FREE_NAME, until_marker
from quintet.parsers.value_reader import MAX_DEPTH, MAX_NAME, json_escaped

QUOTE = re.compile(r'\\.|(")', re.DOTALL)
MAX_VALUE = 2**20  # characters of an argument that must be whole before it can be converted


@dataclass(frozen=True)
class XmlArguments:
    """Arguments that stand in markers of their own, converted by the tool's schema; `close` ends them and the call.

    `keyed` ends a name, and says which types its value may have where that is written there. A line break at the
    end of `keyed` and at the start of `end` is no part of a value. `kind`: markers around the name of a type, which may
    stand before a value and counts for an argument that the schema does not describe.
    """

    key: str
    keyed: Mapping[str, frozenset[str] | None]
    end: str
    close: str
    value: str = ""  # stands before a value, where something does
    after: str = "\n"  # behind a field, in a grammar
    cdata: bool = False  # a value may stand in <![CDATA[ and ]]>
    kind: tuple[str, str] | None = None

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
        mark, allowed = keyed[(yield from scan.until(tuple(keyed), name.append, MAX_NAME))]
        written: list[str] = []
        if self.kind and (yield from scan.skip(self.kind[0])):
            yield from scan.until((self.kind[1],), written.append, MAX_NAME)
        if self.value:
            yield from scan.expect(self.value.strip())
        if mark.endswith("\n") and (yield from scan.peek_marker(("\n",))):
            scan.take(1)
        key = "".join(name).strip()
        calls.write(f'{before}"{json_escaped(key)}": ')
        yield from self._convert(scan, calls, allowed or calls.types(key, "".join(written)))

    def _convert(self, scan: Scanner, calls: CallEventBuilder, allowed: frozenset[str]) -> Steps[None]:
        ends: tuple[str, ...] = (self.end, self.end.lstrip("\n"))
        if self.cdata and (yield from scan.peek_marker(("<![CDATA[",))):
            scan.take(len("<![CDATA["))
            ends = (f"]]>{self.end}",)
        if allowed == TEXT:
            calls.write('"')
            yield from scan.until(ends, lambda piece: calls.write(json_escaped(piece)))
            calls.write('"')
        else:
            calls.write(as_json((yield from self._whole(scan, ends, allowed)), allowed))

    def _whole(self, scan: Scanner, ends: tuple[str, ...], allowed: frozenset[str]) -> Steps[str]:
        """The text before the first end. In a string within a list or an object an end is text."""
        pieces: list[str] = []
        size, quoted = 0, False
        while True:
            start = len(pieces)
            end = yield from scan.until(ends, pieces.append, max(0, MAX_VALUE - size))
            new = "".join(pieces[start:])
            if start or (new.lstrip()[:1] in ("{", "[") and allowed & {"array", "object"}):
                quoted ^= sum(map(bool, QUOTE.findall(new))) % 2 == 1
            if not quoted:
                return "".join(pieces)
            pieces.append(end)
            size += len(new) + len(end)

    def lark(self, grammar: LarkGrammar) -> str:
        declared = properties(grammar.tool.parameters)
        if declared is None:
            ways = []
            for mark, allowed in self.keyed.items():
                value = until_marker(grammar, True, allowed or TEXT, self.end)
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
        for mark, allowed in self.keyed.items():
            if (name + mark).find(mark.strip()) < len(name):
                raise NoGrammar
            with contextlib.suppress(NoGrammar):
                value = until_marker(grammar, schema, allowed or known, self.end)
                ways.append(f"{grammar.literal(self.key + name + mark + self.value)} {value}")
        if not ways:
            raise NoGrammar
        return f"({' | '.join(ways)}) {grammar.literal(self.after)}"


@dataclass(frozen=True)
class ElementArguments:
    """Arguments as elements that are named after them, and what is in an object or a list as elements within these;
    `close` ends them and the call. `mark` stands before each tag, and in no text. An item of a list is called `item`.
    """

    mark: str
    close: str
    item: str = "item"

    def marks(self) -> tuple[str, ...]:
        return (f"{self.mark}<", self.close)

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        calls.write("{")
        before = ""
        schemas = calls.parameters.get("properties")
        while (yield from scan.expect(f"{self.mark}<", self.close)) != self.close:
            elements = _ElementReader(scan, self, calls.parameters)
            name = yield from elements.name()
            calls.write(f'{before}"{json_escaped(name)}": ')
            calls.write((yield from elements.value(name, schemas.get(name) if isinstance(schemas, Mapping) else None)))
            before = ", "
        calls.write("}")
        calls.complete_arguments()
        calls.close()

    def lark(self, grammar: LarkGrammar) -> str:
        return f"{_ElementGrammar(grammar, self).members(grammar.tool.parameters)} {grammar.literal(self.close)}"


class _ElementReader:
    """Reads one argument's element; `root` is the schema of all."""

    def __init__(self, scan: Scanner, form: ElementArguments, root: Mapping[str, Any]) -> None:
        self._scan, self._form, self._root = scan, form, root
        self._left = MAX_VALUE

    def name(self) -> Steps[str]:
        """The rest of a tag -> its name; of an element's last one, with the slash before it."""
        name: list[str] = []
        yield from self._scan.until((">",), name.append, MAX_NAME)
        if not (text := "".join(name)).strip() or f"{self._form.mark}<{text}>" == self._form.close:
            raise MalformedText
        return text

    def value(self, name: str, schema: Any, depth: int = 1) -> Steps[str]:
        """The rest of an element, with its last tag -> its JSON. The last tag of one that no schema describes may
        have any name: no grammar can demand the same."""
        if depth > MAX_DEPTH or name.startswith("/"):
            raise MalformedText
        kind, within = container(schema, self._root)
        text: list[str] = []
        children: list[tuple[str, str]] = []
        while True:
            start = len(text)
            yield from self._scan.until((f"{self._form.mark}<",), text.append, self._left)
            self._left -= sum(map(len, text[start:]))
            child = yield from self.name()
            if child == f"/{name}" or (schema is None and child.startswith("/")):
                return self._json("".join(text), children, schema, kind)
            children.append((child, (yield from self.value(child, self._inner(child, kind, within), depth + 1))))

    def _inner(self, name: str, kind: str, within: Mapping[str, Any]) -> Any:
        """Returns the schema of an element in one that is described by `within`."""
        if kind == "array":
            return within.get("items")
        declared = within.get("properties")
        return (declared if isinstance(declared, Mapping) else {}).get(name, within.get("additionalProperties"))

    def _json(self, text: str, children: list[tuple[str, str]], schema: Any, kind: str) -> str:
        allowed = types(schema, self._root) or TEXT
        if not children:
            empty = kind and "string" not in allowed and not text.strip()
            return {"array": "[]", "object": "{}"}[kind] if empty else as_json(text, allowed)
        if text.strip():
            raise MalformedText
        items = all(name == self._form.item for name, _ in children)
        if kind == "array" or (not kind and items):
            return f"[{', '.join(value for _, value in children)}]"
        values: dict[str, list[str]] = {}
        for name, value in children:
            values.setdefault(name, []).append(value)
        pairs = (
            f"{json.dumps(name, ensure_ascii=False)}: {each[0] if len(each) == 1 else '[' + ', '.join(each) + ']'}"
            for name, each in values.items()
        )
        return f"{{{', '.join(pairs)}}}"


class _ElementGrammar:
    """Writes what may stand in elements. A schema that refers to itself is a rule that does."""

    def __init__(self, lark: LarkGrammar, form: ElementArguments) -> None:
        self._lark, self._form = lark, form
        self._rules: dict[int, str] = {}  # id of a schema, which the tool keeps -> its rule

    def members(self, schema: Mapping[str, Any]) -> str:
        """The elements of an object."""
        declared = properties(schema)
        if declared is None:
            mark, last = self._form.mark, self._form.close.removeprefix(f"{self._form.mark}</").removesuffix(">")
            name = self._lark.terminal(f"{FREE_NAME} & ~{quoted(last)}")
            value = until_marker(self._lark, True, TEXT, mark)
            return f'({self._lark.literal(mark + "<")} {name} ">" {value} "</" {name} ">")*'
        return self._lark.some([(self._element(name, each), needed) for name, each, needed in declared], NOTHING)

    def _element(self, name: str, schema: Any) -> str:
        if not 0 < len(name) <= MAX_NAME or name != name.strip() or ">" in name or name.startswith("/"):
            raise NoGrammar
        first = self._lark.literal(f"{self._form.mark}<{name}>")
        return f"{first} {self._value(schema)} {self._lark.literal(f'</{name}>')}"

    def _value(self, schema: Any) -> str:
        """The rule of a value and the mark behind it."""
        if id(schema) not in self._rules:
            name = self._rules[id(schema)] = self._lark.reserve()
            self._lark.define(name, self._alternatives(schema))
        return self._rules[id(schema)]

    def _alternatives(self, schema: Any) -> str:
        root = self._lark.tool.parameters
        found = options(schema, root)
        nested = [each for each in found if each[0] in ("array", "object")]
        allowed = types(schema, root) or TEXT
        plain = len(found) > len(nested)
        if nested and (len(nested) > 1 or allowed & TEXT):
            raise NoGrammar  # only the end of a text would show which of them it is
        ways = [f"{self._nested(each)} {self._lark.literal(self._form.mark)}" for each in nested]
        ways += [until_marker(self._lark, schema, allowed - {"array", "object"}, self._form.mark)] if plain else []
        return " | ".join(ways)

    def _nested(self, option: Option) -> str:
        kind, schema = option
        if kind == "object":
            return self.members(schema)
        if schema.keys() & {"prefixItems", "contains", "uniqueItems", "unevaluatedItems", "additionalItems"}:
            raise NoGrammar
        low, high = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
        if high is not None and high < low:
            raise NoGrammar
        if high == 0:
            return NOTHING
        item = self._element(self._form.item, schema.get("items", True))
        return f"({item}){{{low},{'' if high is None else high}}}"
