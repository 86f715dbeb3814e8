"""Types that a schema allows, and the depth to which they are looked for."""

from typing import Any

import pytest

from quintet.parsers.lark_grammar import NoGrammar
from quintet.parsers.schema_types import MAX_DEPTH, options


def references(count: int) -> dict[str, Any]:
    """A schema of so many references, one to the other, and a string behind the last."""
    defined = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**defined, f"d{count - 1}": {"type": "string"}}}


def choices(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(count):
        schema = {"anyOf": [schema]}
    return schema


def choices_behind_a_reference(count: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/d", "$defs": {"d": choices(count - 1)}}


@pytest.mark.parametrize("nested", [references, choices, choices_behind_a_reference])
def test_references_and_choices_are_followed_as_deep_as_is_allowed_and_no_deeper(nested: Any) -> None:
    most = MAX_DEPTH - 1
    assert options(nested(most), nested(most)) == [("string", {"type": "string"})]
    for count in (most + 1, most + 2, 400):
        with pytest.raises(NoGrammar):
            options(nested(count), nested(count))


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"properties": {"a": True}}, ["object"]),
        ({"items": {"type": "string"}}, ["array"]),
        ({"minimum": 3}, ["number"]),
        ({"description": "text"}, ["any"]),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"anyOf": [{"type": "integer"}, {"const": "x"}]}, ["integer", "const"]),
    ],
)
def test_a_keyword_of_one_type_implies_the_type(schema: dict[str, Any], kinds: list[str]) -> None:
    assert [kind for kind, _ in options(schema, schema)] == kinds


def test_a_keyword_of_no_type_alone_has_no_grammar() -> None:
    with pytest.raises(NoGrammar):
        options({"maxLength": 3}, {"maxLength": 3})
