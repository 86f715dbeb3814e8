"""Values whose strings have markers that may stand inside them as well: what follows a marker decides."""

import json
from typing import Any

import pytest

from quintet.parsers import TOOL_PARSERS, parse

TEXT, OTHER = '<|"|>', "<escape>"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("[#a#,#b#]", ["a", "b"]),
        ("[#a#, #b# ]", ["a", "b"]),
        ("[#a#,1,true,{k:#b#}]", ["a", 1, True, {"k": "b"}]),
        ("[#a#,[#b#]]", ["a", ["b"]]),
        ("[#a#,-2]", ["a", -2]),
        ("{k:#a#,l:#b#}", {"k": "a", "l": "b"}),
    ],
)
@pytest.mark.parametrize(
    ("name", "mark", "call"),
    [
        ("gemma4", TEXT, "<|tool_call>call:f{x:%s}<tool_call|>"),
        ("functiongemma", OTHER, "<start_function_call>call:f{x:%s}<end_function_call>"),
    ],
)
def test_a_marker_before_another_value_ends_a_string(name: str, mark: str, call: str, written: str, value: Any) -> None:
    (found,) = parse(call % written.replace("#", mark), TOOL_PARSERS.get(name)).calls
    assert json.loads(found.arguments) == {"x": value}


def test_a_marker_before_other_text_is_part_of_the_string() -> None:
    text = "call:f{x:[<escape>a<escape>, b<escape>]}"
    (found,) = parse(f"<start_function_call>{text}<end_function_call>", TOOL_PARSERS.get("functiongemma")).calls
    assert json.loads(found.arguments) == {"x": ["a<escape>, b"]}
