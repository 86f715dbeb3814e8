"""Reads and validates a request's JSON body: strict types, errors that name the field; drops unknown fields."""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from quintet.common.suggestions import nearest_name
from quintet.common.unknown_fields import drop_unknown
from quintet.server.http.errors import ApiError, ClientGone
from quintet.server.http.inputs.unknown_fields import refusal

MAX_DEPTH = 100  # levels of nested lists and objects: templates, checks and logs recurse through them
_LARGE_BODY = 2**17  # bytes; larger bodies are decoded in a worker thread
_MAX_SHOWN_FIELDS = 16  # unknown fields that are compared with the missing one, for did-you-mean
_MAX_VALUE_SHOWN = 80  # characters of a wrong value in an error message


class UnsupportedField(NamedTuple):
    """A field of another API or engine that is not supported here."""

    reason: str
    ignored_values: tuple[Any, ...] = ()  # accepted no-op values; null always is one
    details: Mapping[str, Any] | None = None  # of the error, for programs


class Body(BaseModel):
    """A request's body. `lacking`: unsupported fields, refused with a specific reason.

    Lists are fail_fast: pydantic would collect every error in them, and only the first is returned.
    """

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {}
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Bytes of the JSON that it was read from; 0 if it was not read from JSON."""
        return self._size


Model = TypeVar("Model", bound=Body)


async def read_body(http: HttpRequest, model: type[Model], any_type: bool = False) -> Model:
    """Reads a body. Raises ApiError 400 with the field, or 415 if Content-Type is not JSON. `any_type`: that header
    is not checked, as curl's examples of some APIs leave it out."""
    raw = await _read(http, any_type)
    return await asyncio.to_thread(_parse, raw, model) if len(raw) > _LARGE_BODY else _parse(raw, model)


async def read_field_names(http: HttpRequest) -> frozenset[str]:
    """Reads the names of a body's fields; the route that it is for reads the body again. Raises as read_body()."""
    raw = await _read(http, any_type=False)
    try:
        return frozenset(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}", code="invalid_json") from None


async def _read(http: HttpRequest, any_type: bool) -> bytes:
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if not any_type and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the body is {kind[:_MAX_VALUE_SHOWN]!r}; send JSON, with the header Content-Type: application/json"
        )
    return await read_bytes(http)


async def read_bytes(http: HttpRequest) -> bytes:
    """Reads a body of any type. Raises ClientGone if the client disconnects before its end."""
    try:
        return await http.body()
    except ClientDisconnect:
        raise ClientGone from None


def _parse(raw: bytes, model: type[Model]) -> Model:
    body = parse_body(_decode(raw), model)
    body._size = len(raw)
    return body


def _decode(raw: bytes) -> dict[str, Any]:
    """Decodes a JSON object. Refuses NaN, invalid UTF-8, lone surrogates and numbers out of range."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_type_name(value)}", code="invalid_json")
    _check_depth(value)
    return value


def parse_body(value: dict[str, Any], model: type[Model]) -> Model:
    known = _field_names(model)
    fields = {name: each for name, each in value.items() if name in known or not _is_ignored(name, each, model)}
    strange = [name for name in fields if name not in known]
    _drop_unknown(fields, model)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _wrong_type(error, strange) from None


def _drop_unknown(fields: dict[str, Any], model: type[Body], where: str = "") -> None:
    """Removes unknown fields, also in nested objects."""
    known = _field_names(model)
    if wrong := drop_unknown(fields, known, where):
        raise refusal(where, wrong, known)
    for name, kind in _object_fields(model):
        if isinstance(inner := fields.get(name), dict):
            _drop_unknown(inner, kind, f"{where}.{name}" if where else name)


@functools.cache
def _field_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


@functools.cache
def _object_fields(model: type[BaseModel]) -> tuple[tuple[str, type[Body]], ...]:
    """Returns the fields that are objects with their own fields, and their models."""
    found = []
    for name, each in model.model_fields.items():
        kinds = (each.annotation, *get_args(each.annotation))
        found += [(name, kind) for kind in kinds if isinstance(kind, type) and issubclass(kind, Body)]
    return tuple(found)


def _is_ignored(name: str, value: Any, model: type[Body]) -> bool:
    """True if an unsupported field has a no-op value. Raises ApiError 400 for other values of it."""
    lacking = model.unsupported_fields.get(name)
    if lacking is None:
        return False
    if value is None or any(value == each and type(value) is type(each) for each in lacking.ignored_values):
        return True
    why = f"{name} is not served here: {lacking.reason}"
    raise ApiError(400, why, param=name, code="unsupported_field", details=lacking.details)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)
                 if isinstance(inner, (dict, list))]  # fmt: skip
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body nests deeper than {MAX_DEPTH} lists and objects", code="invalid_json")


def _type_name(value: Any) -> str:
    return {list: "a list", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")


def _wrong_type(error: ValidationError, strange: list[str]) -> ApiError:
    """Returns the first validation error. `strange`: unknown fields of the body."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier())[:200]
    if first["type"] == "missing":
        slip = nearest_name(where, strange[:_MAX_SHOWN_FIELDS])
        instead = f" ({slip} is not known)" if slip else ""
        return ApiError(400, f"{where} is missing{instead}; give it", param=where, code="missing_field")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}, not {_shorten(first['input'])}", param=where, code="invalid_value")


def _shorten(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = repr(value)
    except ValueError:  # an int with more digits than Python prints
        return "a number that long"
    return text if len(text) <= _MAX_VALUE_SHOWN else text[:_MAX_VALUE_SHOWN] + "…"
