"""Calls whose arguments are no JSON: what their grammar lets out, as models are trained to write it, and what it does
not."""

from typing import Any

import pytest

from quintet.parsers import TOOL_PARSERS, Tool, parse

llguidance = pytest.importorskip("llguidance", reason="grammars are an extra: pip install 'quintet-llm[structured]'")

MAYBE_TEXT = {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]}
ROWS = {"type": "array", "items": {"type": "object", "properties": {"on": {"type": "boolean"}}}}


def admits(name: str, schema: dict[str, Any], text: str, needed: bool = True) -> bool:
    """Whether the grammar of a tool f(x) lets the text out."""
    tool = Tool("f", {"properties": {"x": schema}, "required": ["x"] * needed, "additionalProperties": False})
    grammar = TOOL_PARSERS.get(name).grammar([tool])
    assert grammar is not None
    bytewise = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(bytewise, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return taken == len(text.encode()) and bool(matcher.is_accepting())


def qwen(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "schema", "text"),
    [
        ("qwen3_coder", {"type": "string"}, qwen("two\n\nlines\n")),
        ("qwen3_coder", ROWS, qwen('[{"on": true}, {"on": false}]')),
        ("seed_oss", {"type": "integer"}, "<seed:tool_call>\n<function=f>\n<parameter=x>3</parameter>\n</function>\n"
         "</seed:tool_call>"),
        ("glm45", MAYBE_TEXT, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>null</arg_value>\n</tool_call>"),
        ("deepseek_v32", MAYBE_TEXT, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
         '<｜DSML｜parameter name="x" string="true">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         "</｜DSML｜function_calls>"),
        ("pythonic", ROWS, '[f(x=[{"on": True}, {}])]'),
        ("pythonic", MAYBE_TEXT, "[f(x=None), f(x=\"it's\")]"),
        ("olmo3", {"type": "boolean"}, "<function_calls>\nf(x=True)\nf(x=False)\n</function_calls>"),
        ("gemma4", ROWS, "<|tool_call>call:f{x:[{on:true},{}]}<tool_call|>"),
        ("functiongemma", {"enum": ["a", 2]},
         "<start_function_call>call:f{x:<escape>a<escape>}<end_function_call>"),
    ],
)  # fmt: skip
def test_a_call_is_written_as_the_model_was_trained(name: str, schema: dict[str, Any], text: str) -> None:
    assert admits(name, schema, text)
    assert all(call.complete for call in parse(text, TOOL_PARSERS.get(name)).calls)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "a</parameter>b"),  # the reader would take it for the end
        ({"type": "string", "maxLength": 2}, "abc"),
        ({"type": "string", "pattern": "^a|b$"}, "c"),
        ({"type": "string", "pattern": "[a/]{2}"}, "ab"),
        ({"type": "string", "format": "date"}, "2026-13-01"),
        ({"enum": ["a", "b"]}, "c"),
        ({"type": ["string", "null"]}, " None "),  # it would be read as null
        ({"type": ["string", "number"]}, "1e999"),
        (ROWS, "[1]"),
        (ROWS, "rows"),
    ],
)
def test_what_would_be_read_as_something_else_is_not_let_out(schema: dict[str, Any], value: str) -> None:
    if schema.get("pattern") == "^a|b$":  # an anchor of one branch: no grammar, so a list in JSON stands in its place
        assert TOOL_PARSERS.get("qwen3_coder").grammar([Tool("f", {"properties": {"x": schema}})]) is None
    else:
        assert not admits("qwen3_coder", schema, qwen(value))


@pytest.mark.parametrize(
    ("bounds", "lengths"),
    [
        ({}, {0, 1, 2, 3}),
        ({"minItems": 0}, {0, 1, 2, 3}),
        ({"minItems": 1}, {1, 2, 3}),
        ({"minItems": 2, "maxItems": 2}, {2}),
        ({"maxItems": 1}, {0, 1}),
        ({"maxItems": 0}, {0}),
    ],
)
def test_a_list_has_as_many_items_as_its_schema_allows(bounds: dict[str, int], lengths: set[int]) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, **bounds}
    lists = {length: f"[f(x=[{', '.join(['7'] * length)}])]" for length in range(4)}
    assert {length for length, text in lists.items() if admits("pythonic", schema, text)} == lengths


def test_an_argument_that_need_not_be_there() -> None:
    assert admits("pythonic", {"type": "integer"}, "[f()]", needed=False)
    assert admits("pythonic", {"type": "integer"}, "[f(x=1)]", needed=False)
    assert not admits("pythonic", {"type": "integer"}, "[f()]")
    assert not admits("pythonic", {"type": "integer"}, "[f(y=1)]", needed=False)


def test_a_marker_within_a_string_of_a_list_is_text() -> None:
    tool = Tool("f", {"properties": {"x": {"type": "array"}}})
    text = qwen('["a </parameter> \\"b\\" </parameter>", 1]')
    (call,) = parse(text, TOOL_PARSERS.get("qwen3_coder"), None, [tool]).calls
    assert call.arguments == '{"x": ["a </parameter> \\"b\\" </parameter>", 1]}'
    (call,) = parse(qwen("[so] it's </b>"), TOOL_PARSERS.get("qwen3_coder"), None, [tool]).calls
    assert call.arguments == '{"x": "[so] it\'s </b>"}'


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "string", "format": "idn-email"}}},
        {"properties": {"x": {"type": "string", "not": {"const": "a"}}}},
        {"properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x>": {"type": "string"}}},
        {"properties": {" x": {"type": "string"}}},
        {"properties": {"x": {}}, "minProperties": 1},
        {"required": ["y"]},
        {"required": [{}]},
        {"properties": {"x": {"type": "string", "maxLength": "nine"}}},
        {"properties": {"x": {"type": "string", "maxLength": {}}}},
        {"properties": {"x": {"type": "string", "minLength": 1e999}}},
        {"properties": {"x": {"type": "string", "format": []}}},
        {"properties": {"x": {"type": {}}}},
        {"properties": {"x": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]}}},
    ],
)
def test_where_the_form_cannot_hold_the_schema_there_is_no_grammar(parameters: dict[str, Any]) -> None:
    assert TOOL_PARSERS.get("qwen3_coder").grammar([Tool("f", parameters)]) is None


def test_references_that_double_are_given_up() -> None:
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    tool = Tool("f", {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": definitions})
    assert TOOL_PARSERS.get("glm45").grammar([tool]) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": "x"}, {"type": "array", "maxItems": [1]}, {"type": "string", "minLength": {}},
        {"type": "string", "maxLength": -1}, {"type": "string", "format": {"a": 1}},
        {"type": "object", "properties": {"a": {}}, "required": [{}]},
    ],
)  # fmt: skip
def test_a_schema_that_is_wrong_is_left_to_the_library_which_says_why(schema: dict[str, Any]) -> None:
    tool = Tool("f", {"properties": {"x": schema}, "required": ["x"]}, strict=True)
    keyword = [*schema][-1]
    refused = 0
    for name, parser in TOOL_PARSERS.items():
        for grammar in (parser.grammar([tool]), parser.optional_call_grammar([tool])):
            if grammar:  # else it is asked for in JSON, and refused there
                why = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar))
                assert f"for '{keyword}'" in why, (name, why)
                refused += 1
    assert refused


def test_a_slash_behind_a_backslash_is_the_patterns_own() -> None:
    assert admits("qwen3_coder", {"type": "string", "pattern": r"^a\\/b$"}, qwen("a\\/b"))
