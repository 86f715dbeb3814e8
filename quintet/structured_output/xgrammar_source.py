"""Grammars in xgrammar's form, each with llguidance's text, which serves where a shape is combined with calls."""

import json
from collections.abc import Iterator
from typing import Any

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import StructuredOutputsParams
from quintet.structured_output.compile_worker import LISTS, NAMED, ONE
from quintet.structured_output.json_schema import supported_schema

_START = '{"xgrammar": '
# JSON schema keywords that xgrammar enforces, or that restrict nothing
_ENFORCED = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "enum",
    "const", "anyOf", "$ref", "$defs", "definitions", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "title", "description", "default", "examples", "$schema", "$id", "$comment",
})  # fmt: skip
_LENGTHS = ("minLength", "maxLength")


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
        return ["ebnf", wanted.grammar, {}] if "::=" in wanted.grammar else None
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
    return "".join(each if each.isprintable() else f"\\u{ord(each):04x}" for each in plain)


def _not_enforced(schema: Any) -> Iterator[str]:
    """Yields keywords of a schema that xgrammar would pass over."""
    if not isinstance(schema, dict):
        return
    yield from (repr(key) for key in schema if key not in _ENFORCED)
    if "pattern" in schema and any(each in schema for each in _LENGTHS):
        yield "'pattern' beside minLength or maxLength"
    for key in (*ONE, *LISTS, *NAMED):
        inner = schema.get(key)
        parts = inner.values() if isinstance(inner, dict) and key in NAMED else inner
        for each in [parts] if isinstance(parts, dict) else parts if not isinstance(parts, bool | None) else ():
            yield from _not_enforced(each)
