"""JSON types that a schema allows, and conversion of a text to a value of one of them."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.parsers.python_values import literal_to_json
from quintet.parsers.value_reader import JSON, to_json

# Between the parts of JSON: two blanks, or a new line and its indentation. Without an end to it a model may go on with
# nothing else until its tokens are used up.
WHITESPACE = r"[ \t]{1,2}|[ \t]{0,2}\r?\n[ \t]{0,32}"
MAX_OPTIONS = 1000  # of one argument's schema that are looked at; what is in others is text
TEXT = frozenset({"string"})
ANY = frozenset({"null", "boolean", "integer", "number", "array", "object"})
NAMES = {  # of types, as people write them who do not know JSON Schema's
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "long": "integer", "short": "integer", "uint": "integer", "unsigned": "integer",
    "float": "number", "double": "number", "num": "number",
    "bool": "boolean", "binary": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array", "arr": "array", "none": "null",
}  # fmt: skip
WHOLE = re.compile("-?[0-9]+")
LETTERS = re.compile("[a-z]+")  # int64, dict[str, int]
IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array", "minimum": "number"}
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}


def with_bounded_whitespace(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema for llguidance, with an end to whitespace; what it says of that itself goes before."""
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}


def argument_types(parameters: Mapping[str, Any], name: str, otherwise: Any = None) -> frozenset[str]:
    """The types of one argument; of one that the schema does not know, those of `otherwise`, or a string, which is
    also one of which the schema says nothing."""
    properties = parameters.get("properties")
    schema = properties.get(name, otherwise) if isinstance(properties, Mapping) else otherwise
    return types(schema, parameters) or TEXT


def types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows; none if it does not say. References are to `root`."""
    found: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MAX_OPTIONS:
        each = waiting.pop()
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))  # references may go round in circles
            declared = set(_declared_types(each))
            found |= declared
            if not declared:
                waiting += [
                    option for key in ("anyOf", "oneOf", "allOf") for option in _string_list(each, key)[:MAX_OPTIONS]
                ]
                waiting += [resolve_reference(each["$ref"], root)] if "$ref" in each else []
    return frozenset(found)


def container(schema: Any, root: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """("array" or "object", the part of the schema that describes it); ("", {}) if the schema allows neither."""
    waiting = [schema]
    for _ in range(MAX_OPTIONS):
        each = waiting.pop(0) if waiting else None
        if isinstance(each, Mapping):
            for kind in _declared_types(each):
                if kind in ("array", "object"):  # of both the one that is named first
                    return kind, each
            waiting += [option for key in ("anyOf", "oneOf", "allOf") for option in _string_list(each, key)]
            waiting += [resolve_reference(each["$ref"], root)] if "$ref" in each else []
    return "", {}


def _declared_types(schema: Mapping[str, Any]) -> Iterator[str]:
    """The types that a schema itself says, or shows by its values or its other keywords."""
    named = schema.get("type")
    for name in [named] if isinstance(named, str) else _string_list(schema, "type"):
        if word := LETTERS.match(str(name).lower()):
            yield NAMES.get(word[0], word[0])
    if named is None:
        values = [*_string_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        yield from (TYPES.get(type(value), "array") for value in values[:MAX_OPTIONS])
        yield from (kind for key, kind in IMPLIED.items() if key in schema)
    if schema.get("nullable") is True:
        yield "null"


def _string_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return list(value) if isinstance(value, list | tuple) else []


def resolve_reference(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns the part of the schema `root` that a $ref points to."""
    found: Any = root
    for step in str(reference).removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, allowed: frozenset[str]) -> str:
    """The JSON of an argument that is written as plain text. Where it is of no allowed type it stays a string."""
    plain = text.strip()
    value = WORDS.get(plain.lower()) or to_json(plain, JSON) or literal_to_json(plain)
    if value is not None and _fits(value, allowed):
        return value
    return json.dumps(text, ensure_ascii=False)


def _fits(value: str, allowed: frozenset[str]) -> bool:
    kind = KINDS.get(value[0], "number")
    if kind == "number" and "number" not in allowed:
        return "integer" in allowed and (WHOLE.fullmatch(value) is not None or float(value).is_integer())
    return kind in allowed and kind != "string"
