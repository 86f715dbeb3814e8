"""Reads response_format and structured_outputs of OpenAI's, Anthropic's and vLLM's APIs."""

from dataclasses import fields
from typing import Any

from quintet.chat.validation import kind_of, object_of, one_of
from quintet.common.unknown_fields import drop_unknown
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.sampling_protocol import SamplingBody

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_FIELDS = tuple(each.name for each in fields(StructuredOutputsParams))
_SCHEMA_KEYS = ("name", "schema", "strict", "description")  # keys beside a schema; only `schema` has an effect


def format_of_body(body: SamplingBody) -> tuple[StructuredOutputsParams | None, str]:
    """Returns the structured output of a body, and the name of its field."""
    return structured_output_of(body.response_format, "response_format", body.structured_outputs)


def structured_output_of(given: Any, where: str, structured: Any) -> tuple[StructuredOutputsParams | None, str]:
    """Returns the structured output of the field `where` or of structured_outputs, and the field's name."""
    wanted = read_format(given, where)
    if structured is None:
        return wanted, where
    if wanted is not None:
        raise ParameterError(where, "says what structured_outputs says, too; leave one of them out")
    return _structured_params(structured, "structured_outputs"), "structured_outputs"


def read_format(given: Any, where: str) -> StructuredOutputsParams | None:
    """Reads {"type": ...}; a schema is in json_schema (Chat Completions), or beside the type (other APIs)."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object with a type, not {kind_of(given)}")
    kind = one_of(given.get("type"), f"{where}.type", _TYPES)
    if kind == "structural_tag":
        return _structured_params({"structural_tag": given}, where)
    if kind == "json_schema":
        return _structured_params({"json": _schema(given, where)}, where)
    object_of(given, where, ("type",))
    return StructuredOutputsParams(json_object=True) if kind == "json_object" else None


def _schema(given: dict[str, Any], where: str) -> Any:
    nested = "json_schema" in given
    object_of(given, where, ("type", "json_schema") if nested else ("type", *_SCHEMA_KEYS))
    if nested:
        given, where = given["json_schema"], f"{where}.json_schema"
        object_of(given, where, _SCHEMA_KEYS)
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise ParameterError(f"{where}.schema", f"must be a JSON schema, an object, not {kind_of(schema)}")
    return schema


def _structured_params(wanted: Any, where: str) -> StructuredOutputsParams:
    if not isinstance(wanted, dict):
        raise invalid_field(where, f"must be an object, not {kind_of(wanted)}")
    drop_unknown(wanted, _FIELDS, "structured_outputs")
    try:
        return StructuredOutputsParams(**wanted)
    except ValueError as error:
        raise invalid_field(where, f"cannot be used: {error}") from None
