"""Arguments that are written as plain text become what the tool's schema says."""

import json
from typing import Any

import pytest

from quintet.parsers.schema import argument_types, as_json, types


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {}, "5"),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("-1.5e3", {"type": "number"}, -1500),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("text", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": "integer", "nullable": True}, None),
        ("[1, 'a', True]", {"type": "array"}, [1, "a", True]),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ('{"a": 1}', {"properties": {}}, {"a": 1}),
        ('{"a": 1', {"type": "object"}, '{"a": 1'),
        ("2", {"enum": [1, 2]}, 2),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("3", {"const": 3}, 3),
        ("7", {"$ref": "#/$defs/n"}, 7),
        ("7", {"type": "int64"}, 7),
        ("[1]", {"type": "list[int]"}, [1]),
    ],
)
def test_text_becomes_what_the_schema_says(text: str, schema: dict[str, Any], value: Any) -> None:
    root = {"properties": {"x": schema}, "$defs": {"n": {"type": "integer"}}}
    allowed = argument_types(root, "x")
    found = json.dumps(text) if allowed == {"string"} else as_json(text, allowed)
    assert (json.loads(found), type(json.loads(found)) is bool) == (value, type(value) is bool)


def test_a_schema_that_goes_round_in_circles_comes_to_an_end() -> None:
    root = {
        "a": {"anyOf": [{"$ref": "#/a"}] * 50 + [{"$ref": "#/b"}]},
        "b": {"oneOf": [{"$ref": "#/a"}, {"type": "null"}]},
    }
    assert types(root["a"], root) == {"null"}


@pytest.mark.parametrize("schema", [None, 1, [], {"type": 1}, {"anyOf": 1}, {"$ref": 5}, {"enum": "x"}, {"type": [[]]}])
def test_a_schema_that_is_none_says_nothing(schema: Any) -> None:
    assert argument_types({"properties": {"x": schema}}, "x") == {"string"}
    assert argument_types({"properties": schema}, "x") == {"string"}
