"""Parsers from a checkpoint's `response_template`, transformers' description of what a model writes.

https://huggingface.co/docs/transformers/chat_response_parsing. A template has regular expressions. They are not run:
those that stand for literals, with names and space between them, become a declaration as our own formats are, and all
others are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from quintet.parsers.call_events import CallEventBuilder
from quintet.parsers.combinators import NAME, Arguments, FormatPart, JsonCall, alternatives, one_or_more
from quintet.parsers.formats import ReasoningParser, ToolParser, call_block
from quintet.parsers.lark_grammar import LarkGrammar
from quintet.parsers.scanner import Scanner, Steps
from quintet.parsers.value_reader import JSON, MAX_NAME, PYTHON, Notation, gemma
from quintet.parsers.xml_arguments import XmlArguments

KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
THOUGHTS = ("thinking", "reasoning_content")
FIELDS = {*THOUGHTS, "content", "tool_calls"}
MAX_WAYS = 16  # texts that one expression stands for
MAX_PATTERN = 4096  # characters of an expression


class Gap(Enum):
    """Text between two literals of an expression: space, or any."""

    SPACE = "\n"
    ANY = " "


@dataclass(frozen=True)
class Group:
    """A named group of an expression."""

    name: str


Item = str | Gap | Group


@dataclass(frozen=True)
class TextBefore:
    """Any short text before a marker, and the marker."""

    mark: str

    def marks(self) -> tuple[str, ...]:
        return ()

    def read(self, scan: Scanner, calls: CallEventBuilder) -> Steps[None]:
        yield from scan.until((self.mark,), lambda text: None, MAX_NAME)

    def lark(self, grammar: LarkGrammar) -> str:
        return grammar.literal((Gap.ANY.value if self.mark[0].isalpha() else "") + self.mark)


def parsers_of(template: Mapping[str, Any]) -> tuple[ToolParser | None, ReasoningParser | None]:
    """Returns the parsers that a response_template describes; None for what it does not have. ValueError if it has
    something that is not served."""
    try:
        return _parsers_of(template)
    except (AttributeError, IndexError, KeyError, TypeError) as error:  # values of other types than they must have
        raise _refusal(f"is malformed ({type(error).__name__}: {error})") from error


def _parsers_of(template: Mapping[str, Any]) -> tuple[ToolParser | None, ReasoningParser | None]:
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(each, Mapping) for each in fields.values()):
        raise _refusal("has no fields")
    if unknown := {*template} - KEYS | ({*fields} - FIELDS):
        raise _refusal(f"has {', '.join(map(repr, sorted(map(str, unknown))))}, which is not served")
    content = fields.get("content", {})
    leads = _literals(content, "open", "content")
    drops = (*leads, *_literals(content, "close", "content"), *_literals(template, "start_anchor", "the template"))
    drops = tuple(dict.fromkeys(mark.strip() for mark in drops if mark.strip()))
    thoughts = [_reasoning(name, fields[name], drops, leads) for name in THOUGHTS if name in fields]
    tool = _tool(fields["tool_calls"], drops) if "tool_calls" in fields else None
    return tool, thoughts[0] if thoughts else None


def _refusal(why: str) -> ValueError:
    return ValueError(f"the tokenizer's response_template {why}; name another parser, or none")


def _reasoning(name: str, field: Mapping[str, Any], drops: tuple[str, ...], leads: tuple[str, ...]) -> ReasoningParser:
    opens, closes = (_literals(field, key, name) for key in ("open", "close"))
    if not opens or not closes or field.get("content", "text") != "text" or "transform" in field:
        raise _refusal(f"describes {name} by other things than markers around text, which is not served")
    marks, ends = tuple(mark.rstrip("\n") for mark in opens), tuple(mark.lstrip("\n") for mark in closes)
    if not all((*marks, *ends)):
        raise _refusal(f"has line breaks alone as a marker of {name}, which is not served")
    return ReasoningParser(marks, ends, drops=drops, leads=leads)


def _tool(field: Mapping[str, Any], drops: tuple[str, ...]) -> ToolParser:
    ways = _ways(field, "open", "tool_calls")
    closes = _ways(field, "close", "tool_calls")
    if not ways or not closes or any(isinstance(item, Group) for close in closes for item in close):
        raise _refusal("describes tool_calls without markers around them, which is not served")
    if len({str(way[0]) for way in ways}) < len(ways):
        raise _refusal("has ways to begin tool_calls that begin alike, which is not served")
    blocks = []
    for way in ways:
        named = [item.name for item in way if isinstance(item, Group)]
        if len(named) > 1 or not isinstance(way[0], str):
            raise _refusal("does not begin tool_calls with a marker and at most one name, which is not served")
        body = _body(field, named, closes)
        ends = (
            [_parts(close) for close in closes] if not isinstance(body[-1], XmlArguments) else [_parts(closes[0][1:])]
        )
        end = ends[0] if len(ends) == 1 else [alternatives(*map(tuple, ends))]
        blocks.append(call_block(*_parts(way), *body, *end))
    separator = None if field.get("transform_each") is True or field.get("content") == "python-call-list" else "\n"
    return ToolParser(tuple(blocks), separator, drops)


def _body(field: Mapping[str, Any], named: list[str], closes: list[list[Item]]) -> list[str | FormatPart]:
    """Returns the parts between the markers of a call. `named`: the group with its name, if one has it."""
    content, arguments = field.get("content", "text"), field.get("content_args") or {}
    function = _function(field.get("transform"))
    if content == "json":
        notation = _notation(arguments)
        if named and function == {"name": f"{{{named[0]}}}", "arguments": "{content}"}:
            return [Arguments(notation, "," if notation is not JSON else ", ")]
        keys = _keys(function, "" if field.get("transform_each") is True else "content.")
        if not named and notation is JSON and keys:
            call = JsonCall(*keys)
            listed = field.get("transform_each") is True
            return ["[", one_or_more(call, between=", "), "]"] if listed else [call]
    if content == "xml-inline" and named and function == {"name": f"{{{named[0]}}}", "arguments": "{content}"}:
        if len(closes) == 1 and isinstance(closes[0][0], str):
            return [_xml_arguments(str(arguments.get("tag_pattern", "")), closes[0][0])]
    if content == "python-call-list" and not named and _keys(function, ""):
        return ["[", one_or_more(NAME, Arguments(PYTHON), between=", "), "]"]
    raise _refusal(f"describes calls of tools as {content!r} with a transform or arguments that are not served")


def _function(transform: Any) -> Any:
    """Returns what a call's `function` is made of."""
    return transform.get("function") if isinstance(transform, Mapping) else None


def _keys(function: Any, before: str) -> tuple[str, str] | None:
    """Returns the keys of a JSON object in which the name and the arguments of a call stand."""
    if function == "{content}" and before:
        return "name", "arguments"
    if not isinstance(function, Mapping) or {*function} != {"name", "arguments"}:
        return None
    keys = [str(function[key]).removeprefix(f"{{{before}").removesuffix("}") for key in ("name", "arguments")]
    same = all(f"{{{before}{key}}}" == function[part] for key, part in zip(keys, ("name", "arguments"), strict=True))
    return (keys[0], keys[1]) if same and all(key.isidentifier() for key in keys) else None


def _notation(arguments: Mapping[str, Any]) -> Notation:
    delimiters = arguments.get("string_delims") or []
    if not ({*arguments} - {"allow_non_json"}):
        return JSON
    if {*arguments} <= {"unquoted_keys", "string_delims"} and arguments.get("unquoted_keys") and len(delimiters) == 1:
        first, last = delimiters[0]
        if first == last:
            return gemma(first, '"')
    raise _refusal("describes JSON with changes that are not served")


def _xml_arguments(pattern: str, close: str) -> XmlArguments:
    ways = [_joined(way) for way in _expand(pattern)]
    form = [type(item) for item in ways[0]] if len(ways) == 1 else []
    if form != [str, Group, str, Group, str] or [ways[0][1], ways[0][3]] != [Group("key"), Group("value")]:
        raise _refusal(f"has the tag_pattern {pattern!r}, which is not served")
    key, _, keyed, _, end = map(str, ways[0])
    return XmlArguments(key, {keyed: None}, end, close)


def _joined(way: Sequence[Item]) -> list[Item]:
    """Joins literals and what stands between them, as models write it."""
    joined: list[Item] = []
    for item, after in zip(way, [*way[1:], ""], strict=True):
        if item is Gap.ANY:
            item = " " if isinstance(after, str) and after[:1].isalpha() else ""
        text = item.value if isinstance(item, Gap) else item
        if isinstance(text, str) and joined and isinstance(joined[-1], str):
            joined[-1] += text
        else:
            joined.append(text)
    return joined


def _parts(way: Sequence[Item]) -> list[str | FormatPart]:
    """Returns a declaration of what an expression stands for; a group is the function's name."""
    parts: list[str | FormatPart] = []
    for at, item in enumerate(way):
        before, after = way[at - 1] if at else None, way[at + 1] if at + 1 < len(way) else None
        if isinstance(item, str):
            text = item + ("\n" if after is Gap.SPACE and at + 2 < len(way) else "")
            parts.append(TextBefore(text) if before is Gap.ANY else text)
        elif isinstance(item, Group):
            parts.append(NAME)
    return parts


def _literals(field: Mapping[str, Any], key: str, name: str) -> tuple[str, ...]:
    """Returns the markers that a field has under `key` or as an expression; none if it has neither."""
    ways = [_joined(way) for way in _ways(field, key, name)]
    if any(len(way) != 1 or not isinstance(way[0], str) for way in ways):
        raise _refusal(f"has an expression under {key!r} of {name} that stands for no marker, which is not served")
    return tuple(str(way[0]) for way in ways)


def _ways(field: Mapping[str, Any], key: str, name: str) -> list[list[Item]]:
    """Returns what a field's marker may be; nothing if it has none."""
    if f"{key}_pattern" in field:
        return [way for way in _expand(str(field[f"{key}_pattern"])) if way]
    given = field.get(key, [])
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(each, str) and each for each in texts):
        raise _refusal(f"has no texts under {key!r} of {name}")
    return [[each] for each in texts]


def _trimmed(way: list[Item]) -> list[Item]:
    """The same without the space around it, and with adjacent literals as one."""
    joined: list[Item] = []
    for item in way:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        elif item is not Gap.SPACE or (joined and joined[-1] is not Gap.SPACE):
            joined.append(item)
    return joined[:-1] if joined and joined[-1] is Gap.SPACE else joined


def _expand(pattern: str) -> list[list[Item]]:
    """Returns what an expression stands for."""
    reader = _Expression(pattern[: MAX_PATTERN + 1])
    ways = reader.alternatives()
    if len(pattern) > MAX_PATTERN or not reader.ended:
        raise reader.refusal()
    return [_trimmed(way) for way in ways]


class _Expression:
    """Reads a regular expression of literals, groups with names, space and any text."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    @property
    def ended(self) -> bool:
        return self._at >= len(self._text)

    def refusal(self) -> ValueError:
        return _refusal(
            f"has the expression {self._text[:200]!r}, of which {self._text[self._at :][:20]!r} is not served"
        )

    def _skip(self, *texts: str) -> str:
        found = next((text for text in texts if self._text.startswith(text, self._at)), "")
        self._at += len(found)
        return found

    def alternatives(self) -> list[list[Item]]:
        ways = self._sequence()
        while self._skip("|"):
            ways += self._sequence()
        if len(ways) > MAX_WAYS:
            raise self.refusal()
        return ways

    def _sequence(self) -> list[list[Item]]:
        ways: list[list[Item]] = [[]]
        while not self.ended and self._text[self._at] not in "|)":
            found = self._atom()
            gap = len(found) == 1 and isinstance(next(iter(found[0]), None), Gap)
            if gap:
                self._skip("*?", "+?", "*", "+", "?")
            elif self._skip("?"):
                found = [*found, []]
            ways = [way + each for way in ways for each in found]
            if len(ways) > MAX_WAYS:
                raise self.refusal()
        return ways

    def _atom(self) -> list[list[Item]]:
        if self._skip("(?:"):
            self._depth += 1
            ways = self.alternatives() if self._depth < MAX_WAYS else []
            self._depth -= 1
            if not ways or not self._skip(")"):
                raise self.refusal()
            return ways
        if self._skip("(?P<"):
            return [[self._group()]]
        if self._skip("^", "$", "\\b", "\\Z"):
            return [[]]
        if self._skip("\\s"):
            return [[Gap.SPACE]]
        if self._skip(".") or self._class():
            return [[Gap.ANY]]
        return [[self._character()]]

    def _character(self) -> str:
        if self._skip("\\"):
            escaped = self._text[self._at : self._at + 1]
            if not escaped or (escaped.isalnum() and escaped not in "nrt"):
                raise self.refusal()
            self._at += 1
            return {"n": "\n", "r": "\r", "t": "\t"}.get(escaped, escaped)
        if self._text[self._at] in "()[]{}*+?":
            raise self.refusal()
        self._at += 1
        return self._text[self._at - 1]

    def _class(self) -> str:
        """Takes a class that leaves characters out."""
        if not self._text.startswith("[^", self._at):
            return ""
        end = self._text.find("]", self._at + 3)
        if end < 0:
            raise self.refusal()
        found, self._at = self._text[self._at : end + 1], end + 1
        return found

    def _group(self) -> Group:
        """The rest of a named group: what it may be, its place says."""
        name, _, _ = self._text[self._at :].partition(">")
        self._at += len(name) + 1
        depth = 1
        while depth:
            if self.ended:
                raise self.refusal()
            if not self._class():
                skipped = self._text[self._at]
                self._at += 2 if skipped == "\\" else 1
                depth += {"(": 1, ")": -1}.get(skipped, 0)
        return Group(name)
