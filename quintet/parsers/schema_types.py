"""Values that a schema allows, type by type, as far as a grammar that is not JSON's can express them."""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.parsers.lark_grammar import TEXT, NoGrammar
from quintet.parsers.schema import IMPLIED, TYPES, resolve_reference

Option = tuple[str, Mapping[str, Any]]
"""A type and the schema that holds for it; or "const" with its value; or "any"."""

MAX_LOOKUPS = 1000  # at parts of one argument's schema
MAX_DEPTH = 20  # references and choices within one another
UNRESTRICTING_KEYWORDS = frozenset({  # keywords that do not restrict the value
    "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
    "$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "strict",
})  # fmt: skip
COMBINING = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
DEFINED = ("$defs", "definitions")
DAY = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"  # of those that every month has
HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+\\-]([01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": DAY,
    "time": HOUR,
    "date-time": f"{DAY}T{HOUR}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": "[a-zA-Z0-9_+\\-]+(\\.[a-zA-Z0-9_+\\-]+)*@[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*(\\.[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*)+",
    "ipv4": f"{BYTE}(\\.{BYTE}){{3}}",
}


def options(schema: Any, root: Mapping[str, Any]) -> list[Option]:
    """Raises NoGrammar where that is not so simple. References are to `root`."""
    found = list(_options(schema, root, iter(range(MAX_LOOKUPS)), MAX_DEPTH))
    if not found:
        raise NoGrammar
    return found


def _options(schema: Any, root: Mapping[str, Any], looks: Iterator[int], deep: int) -> Iterator[Option]:
    if next(looks, None) is None or deep <= 0 or not (schema is True or isinstance(schema, Mapping)):
        raise NoGrammar
    restricting = (
        {} if schema is True else {key: value for key, value in schema.items() if key not in UNRESTRICTING_KEYWORDS}
    )
    if not restricting:
        yield "any", restricting
    elif "enum" in restricting or "const" in restricting:
        yield from _constants(restricting)
    elif "type" in restricting:
        yield from _typed(restricting)
    elif restricting.keys() == {"$ref"}:
        yield from _options(resolve_reference(restricting["$ref"], root), root, looks, deep - 1)
    elif len(restricting) == 1 and (key := next(iter(restricting))) in ("anyOf", "oneOf", "allOf"):
        yield from _combined(key, restricting[key], root, looks, deep)
    elif implied := [kind for key, kind in IMPLIED.items() if key in restricting]:
        yield implied[0], restricting
    else:
        raise NoGrammar


def _constants(restricting: Mapping[str, Any]) -> Iterator[Option]:
    if not restricting.keys() <= {"type", "enum", "const"} or ("enum" in restricting and "const" in restricting):
        raise NoGrammar
    values = restricting["enum"] if "enum" in restricting else [restricting["const"]]
    kinds = set(_kinds(restricting["type"])) if "type" in restricting else None
    if not isinstance(values, list):
        raise NoGrammar
    for value in values[:MAX_LOOKUPS]:
        kind = TYPES.get(type(value), "array")
        if kinds is None or kind in kinds or (kind == "integer" and "number" in kinds):
            yield "const", {"const": value}


def _typed(restricting: Mapping[str, Any]) -> Iterator[Option]:
    kinds = _kinds(restricting["type"])
    if "string" in kinds and restricting.keys() & COMBINING:
        raise NoGrammar
    for kind in kinds:
        yield kind, restricting


def _combined(key: str, given: Any, root: Mapping[str, Any], looks: Iterator[int], deep: int) -> Iterator[Option]:
    if not isinstance(given, list) or not given or (key == "allOf" and len(given) > 1):
        raise NoGrammar
    each = [list(_options(branch, root, looks, deep - 1)) for branch in given]
    kinds = [{_kind(option) for option in branch} for branch in each]
    if key == "oneOf" and any(one & other for one, other in itertools.combinations(kinds, 2)):
        raise NoGrammar  # a value might be of two of them
    yield from itertools.chain.from_iterable(each)


def _kind(option: Option) -> str:
    kind, schema = option
    kind = TYPES.get(type(schema["const"]), "array") if kind == "const" else kind
    return "number" if kind == "integer" else kind


def _kinds(given: Any) -> list[str]:
    kinds = given if isinstance(given, list) else [given]
    if not kinds or not all(isinstance(kind, str) and kind in TYPES.values() or kind == "array" for kind in kinds):
        raise NoGrammar
    return kinds


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema with what it may refer to."""
    return {**{key: root[key] for key in DEFINED if key in root}, **schema} if isinstance(schema, Mapping) else schema


def text_of(schema: Mapping[str, Any]) -> str:
    """A terminal's expression: a string that follows the schema, as it is."""
    low, high = (count_of(schema, key) for key in ("minLength", "maxLength"))
    sized = low is not None or high is not None
    holds = [f"/(?s:.{{{low or 0},{'' if high is None else high}}})/" if sized else TEXT]
    if "pattern" in schema:
        holds.append(_pattern(schema["pattern"]))
    if "format" in schema:
        if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
            raise NoGrammar
        holds.append(f"/{FORMATS[schema['format']]}/")
    return " & ".join(holds)


def count_of(schema: Mapping[str, Any], key: str) -> int | None:
    """A bound on how many there are; None if the schema sets none."""
    given = schema.get(key)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0 or given != given // 1:
        raise NoGrammar
    return int(given)


def _pattern(given: Any) -> str:
    """It is looked for anywhere, but for its anchors."""
    if not isinstance(given, str) or not given:
        raise NoGrammar
    begins, ends = given.startswith("^"), given.endswith("$") and not given.endswith("\\$")
    inner = given[begins : len(given) - ends]
    bare = re.sub(r"\[(?:[^\]\\]|\\.)*\]", "", re.sub(r"\\[^bBAzZ1-9kpPuxcG]", "", inner))
    if re.search(r"[\\^$]|\(\?(?!:)|[*+?}][+?]", bare) or ("|" in bare and (begins or ends)) or "\n" in inner:
        raise NoGrammar
    escaped = re.sub(r"\\.|/", lambda at: "\\/" if at[0] == "/" else at[0], inner)
    return f"({'' if begins else TEXT} /{escaped}/ {'' if ends else TEXT})" if inner else TEXT
