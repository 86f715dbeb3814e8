"""What an answer must look like, as OpenAI's, Anthropic's and vLLM's clients say it."""

from dataclasses import fields
from typing import Any

from quintet.engine.checks import kind_of, object_of, one_of
from quintet.engine.strays import sift
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from quintet.server.http.errors import ApiError
from quintet.server.http.protocol.sampling import SamplingBody
from quintet.server.http.service import Service

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_FIELDS = tuple(each.name for each in fields(StructuredOutputsParams))
_NAMED = ("name", "schema", "strict", "description")  # of a schema; all but itself are for the reader


def of_body(body: SamplingBody) -> tuple[Any, str]:
    """response_format or structured_outputs -> (fields of StructuredOutputsParams, or None; the field that asks)."""
    wanted = of_format(body.response_format, "response_format")
    if body.structured_outputs is None:
        return wanted, "response_format"
    if wanted is not None:
        raise ParameterError("response_format", "says what structured_outputs says, too; leave one of them out")
    return body.structured_outputs, "structured_outputs"


def of_format(given: Any, where: str) -> dict[str, Any] | None:
    """{"type": ...} with a schema in json_schema, as Chat Completions have it, or beside its type, as others do."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ParameterError(where, f"must be an object with a type, not {kind_of(given)}")
    kind = one_of(given.get("type"), f"{where}.type", _TYPES)
    if kind == "structural_tag":
        return {"structural_tag": given}
    if kind == "json_schema":
        return {"json": _schema(given, where)}
    object_of(given, where, ("type",))
    return {"json_object": True} if kind == "json_object" else None


def _schema(given: dict[str, Any], where: str) -> Any:
    nested = "json_schema" in given
    object_of(given, where, ("type", "json_schema") if nested else ("type", *_NAMED))
    if nested:
        given, where = given["json_schema"], f"{where}.json_schema"
        object_of(given, where, _NAMED)
    schema = given.get("schema")
    if not isinstance(schema, dict):
        raise ParameterError(f"{where}.schema", f"must be a JSON schema, an object, not {kind_of(schema)}")
    return schema


async def shape(service: Service, params: SamplingParams, wanted: Any, where: str) -> str:
    """Sets params.structured_outputs to what is wanted -> its grammar, which compiles.

    Raises ApiError 400 that blames `where`.
    """
    if wanted is None:
        return ""
    try:
        shaped = wanted if isinstance(wanted, StructuredOutputsParams) else _fields(wanted)
        grammar = await service.backend.shapes.grammar(shaped)
    except ValueError as error:
        said = str(error).removeprefix("structured_outputs ")
        raise ApiError(400, f"{where} {said}", param=where, code="invalid_value") from None
    params.structured_outputs = shaped
    return grammar


def _fields(wanted: Any) -> StructuredOutputsParams:
    if not isinstance(wanted, dict):
        raise ValueError(f"must be an object, not {kind_of(wanted)}")
    sift(wanted, _FIELDS, "structured_outputs")
    try:
        return StructuredOutputsParams(**wanted)
    except ValueError as error:
        raise ValueError(f"cannot be used: {error}") from None
