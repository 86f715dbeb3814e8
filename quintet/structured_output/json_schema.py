"""JSON schemas as the library that compiles them takes them."""

from collections.abc import Callable
from typing import Any

from quintet.structured_output.compile_worker import LISTS, NAMED, ONE

# JSON Schema's, and the library's own; what it does not serve of them is refused. Others say nothing, and are left out.
FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
    "unknown",
}  # fmt: skip


def supported_schema(schema: Any, *, closed: bool = False) -> Any:
    """Returns the schema in a form that the library allows and refuses correctly. The argument is not changed.

    closed: objects have the properties that it names, and no more.
    """
    schema = _map_schemas(_plain, schema)
    return _map_schemas(_closed, schema) if closed else schema


def _map_schemas(change: Callable[[dict[str, Any]], None], schema: Any) -> Any:
    """A copy in which every schema went through the change; what is a value or a name in it stays as it is."""
    if not isinstance(schema, dict):
        return schema
    copied: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            copied[key] = {name: _map_schemas(change, each) for name, each in value.items()}
        elif key in LISTS and isinstance(value, list):
            copied[key] = [_map_schemas(change, each) for each in value]
        else:
            copied[key] = _map_schemas(change, value) if key in ONE else value
    change(copied)
    return copied


def _plain(schema: dict[str, Any]) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    _adjust_bounds(schema)


def _closed(schema: dict[str, Any]) -> None:
    """additionalProperties false where properties are named and it says nothing of others."""
    if isinstance(schema.get("properties"), dict) or isinstance(schema.get("patternProperties"), dict):
        schema.setdefault("additionalProperties", False)


def _adjust_bounds(schema: dict[str, Any]) -> None:
    """Moves an excluded whole number if the other border is less than 1 away: the library would allow the number.

    The border moves by a millionth of the way to the other.
    """
    low, high = schema.get("exclusiveMinimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and _close(low, high) and low == int(low):
        schema["minimum"] = low + (high - low) / 2**20
        del schema["exclusiveMinimum"]
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("exclusiveMaximum")
    if high is not None and _close(low, high) and high == int(high):
        schema["maximum"] = high - (high - low) / 2**20
        del schema["exclusiveMaximum"]


def _close(low: Any, high: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (low, high))
    return numbers and 0 < high - low < 1
