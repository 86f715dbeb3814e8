"""Grammars in xgrammar's form, each with llguidance's text, which serves where a shape is combined with calls."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import StructuredOutputsParams
from quintet.structured_output.compile_worker import LISTS, NAMED, ONE
from quintet.structured_output.json_schema import supported_schema
from quintet.structured_output.structural_tag import is_ebnf

_START = '{"xgrammar": '
_SILENT = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
})  # fmt: skip
_ALONE = ("$ref", "const", "enum", "anyOf")  # the first that is there is read, and nothing beside it
_LENGTHS = ("minLength", "maxLength")
_OF_TYPE = (
    *_LENGTHS, "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems",
)  # fmt: skip
_ENFORCED = _SILENT.union(
    _ALONE, _OF_TYPE, ("type", "properties", "required", "additionalProperties", "items", "prefixItems")
)
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: type(value) is int or (isinstance(value, float) and value.is_integer()),
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def with_xgrammar(text: str, wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """Adds the grammar in xgrammar's form to llguidance's. Lark's grammars and structural tags stay llguidance's.
    ValueError names a keyword that xgrammar would not enforce."""
    written = _written(wanted, config)
    return text if written is None else f"{_START}{json.dumps(written)}, " + json.dumps({"guidance": text})[1:]


def guidance_text(text: str) -> str:
    """Returns llguidance's grammar of a text."""
    return str(json.loads(text)["guidance"]) if text.startswith(_START) else text


def xgrammar_source(text: str) -> list[Any] | None:
    """Returns kind, source and options of xgrammar's grammar; None if llguidance compiles the text."""
    return list(json.loads(text)["xgrammar"]) if text.startswith(_START) else None


def _written(wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> list[Any] | None:
    if wanted.regex is not None:
        return ["regex", wanted.regex, {}]
    if wanted.choice is not None:
        return ["ebnf", "root ::= " + " | ".join(_quoted(each) for each in wanted.choice), {}]
    if wanted.grammar is not None:
        return ["ebnf", wanted.grammar, {}] if is_ebnf(wanted.grammar) else None
    if wanted.structural_tag is not None:
        return None
    if wanted.whitespace_pattern is not None:
        raise ValueError("whitespace_pattern is not there with the backend xgrammar; leave it out, or use guidance")
    schema: Any = {"type": "object"} if wanted.json is None else wanted.json
    schema = json.loads(schema) if isinstance(schema, str) else schema
    closed = bool(wanted.disable_additional_properties or config.disable_additional_properties)
    schema = {} if schema is True else schema
    if unknown := next(_not_enforced(schema), ""):
        raise ValueError(f"the backend xgrammar does not enforce the keyword {unknown}; leave it out, or use guidance")
    bare = bool(wanted.disable_any_whitespace or config.disable_any_whitespace)
    options = {"any_whitespace": not bare, "strict_mode": closed, "separators": [",", ":"] if bare else None}
    return ["json_schema", json.dumps(supported_schema(schema, closed=closed)), options]


def _quoted(text: str) -> str:
    """Writes a text as a literal of EBNF."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in plain)


def _not_enforced(schema: Any) -> Iterator[str]:
    """Yields keywords of a schema that xgrammar would pass over. What is no schema llguidance refuses."""
    if not isinstance(schema, dict):
        return
    yield from (repr(key) for key in schema if key not in _ENFORCED)
    yield from _passed_over(schema)
    if "pattern" in schema and any(each in schema for each in _LENGTHS):
        yield "'pattern' beside minLength or maxLength"
    for key in dict.fromkeys((*ONE, *LISTS, *NAMED)):  # `items` is in two of them
        inner = schema.get(key)
        parts = inner.values() if isinstance(inner, dict) and key in NAMED else inner
        for each in [parts] if isinstance(parts, dict) else parts if isinstance(parts, Iterable) else ():
            yield from _not_enforced(each)


def _passed_over(schema: dict[str, Any]) -> Iterator[str]:
    """Yields keywords that xgrammar enforces in another place alone."""
    alone = next((key for key in _ALONE if key in schema), None)
    if alone is not None:
        typed = (alone == "const" and _has_type(schema, [schema[alone]])) or (
            alone == "enum" and _has_type(schema, schema[alone])
        )
        for key in schema:
            if key != alone and key not in _SILENT and not (key == "type" and typed):
                yield f"{key!r} beside {alone}"
        return
    if "type" not in schema:
        yield from (f"{key!r} without type" for key in _OF_TYPE if key in schema)
    named, wanted = schema.get("properties", {}), schema.get("required")
    if isinstance(wanted, list) and isinstance(named, dict) and any(str(each) not in named for each in wanted):
        yield "'required' with a name that properties lacks"


def _has_type(schema: dict[str, Any], values: Any) -> bool:
    """Returns whether all these values have the schema's type."""
    kinds = schema.get("type")
    given = kinds if isinstance(kinds, list) else [kinds]
    known = [_TYPES[each] for each in given if isinstance(each, str) and each in _TYPES]
    return isinstance(values, list) and all(any(fits(value) for fits in known) for value in values)
