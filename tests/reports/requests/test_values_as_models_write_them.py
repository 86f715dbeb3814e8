"""Calls hold values as models write them, and a call that breaks is no call (report 11)."""

import ast
import json
from typing import Any

import pytest

from quintet.parsers import TOOL_PARSERS, Parsed, StreamParser, Tool, ToolCall, parse
from quintet.parsers.python_values import literal_to_json
from tests.parsers.cutting import whole

TOOLS = [Tool("f", {"type": "object", "properties": {"s": {"type": "string"}, "a": {"type": "array"}}})]
PYTHON = {
    "pythonic": "[{}]",
    "lfm2": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "llama4_pythonic": "<|python_start|>[{}]<|python_end|>",
    "olmo3": "<function_calls>\n{}\n</function_calls>",
}
LITERALS = [
    '"""two\nlines"""', "'''it's \"so\"'''", '"a" "b"', "'a'\n  'b' \"c\"", '("a" "b")', '("a",)', "()", "('a', 1)",
    r"r'\d+'", r'R"a\"b"', r"u'\u00e9'", r"'\x41\101\0\N{BULLET}\''", "'a\\\nb'", '""', '""""""', "'#'", "r'' ''",
    "1_000", "0x1F", "0o17", "0b101", "-5", "+5", "1.", ".5", "-1.5e-3", "1_0.5", "True", "None", "[1, 2,]", "[[], {}]",
    "{'a': 1, 'b': [None, False],}", "{1: 'x', False: 2}", "[1,  # one\n 2]", "'\\U0001F600'",
]  # fmt: skip
BROKEN = ["1 + 2", "open('x')", "b'x'", "f'{x}'", "{1, 2}", "'a' + 'b'", "x", "1j", "[1 2]", "007", "'a' 1", "nan"]


@pytest.mark.parametrize("literal", LITERALS)
def test_literals_are_what_python_reads(literal: str) -> None:
    written = literal_to_json(literal)
    assert written is not None
    assert json.loads(written) == json.loads(json.dumps(ast.literal_eval(f"({literal}\n)")))


@pytest.mark.parametrize("literal", BROKEN)
def test_what_is_no_literal_is_none(literal: str) -> None:
    assert literal_to_json(literal) is None


def test_an_escape_that_says_nothing_is_text() -> None:
    assert literal_to_json(r"'\q\/'") == r'"\\q\\/"'


@pytest.mark.parametrize("name", PYTHON)
def test_calls_hold_them(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    for literal in LITERALS:
        text = PYTHON[name].format(f"f(s={literal}, i=1,)")
        expected = json.loads(json.dumps({"s": ast.literal_eval(f"({literal}\n)"), "i": 1}))
        for size in (len(text), 1, 3, 7):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            found = whole(StreamParser(tool, None, TOOLS), pieces)
            assert [(call.name, json.loads(call.arguments), call.complete) for call in found.calls] == [
                ("f", expected, True)
            ], literal
            assert found.content == ""


@pytest.mark.parametrize("name", PYTHON)
def test_a_call_that_breaks_is_no_call(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    for literal in BROKEN:
        text = PYTHON[name].format(f"f(i=1, s={literal})")
        found = whole(StreamParser(tool, None, TOOLS), text)
        assert found == parse(text, tool, None, TOOLS)
        assert found.calls == () and found.content.startswith(text.split("f(")[0])
        assert "".join(found.content.split()) == "".join(text.split())


def test_a_call_in_json_that_breaks_is_no_call_of_a_whole_answer() -> None:
    for text in ('<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>', '<tool_call>{"name": "f", "a'):
        found = whole(StreamParser(TOOL_PARSERS.get("hermes"), None, TOOLS, whole_calls=True), text)
        assert found == Parsed(content=text)
    forgotten = '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'
    found = whole(StreamParser(TOOL_PARSERS.get("hermes"), None, TOOLS, whole_calls=True), forgotten)
    assert found == Parsed(calls=(ToolCall("f", '{"a": 1}'),))


@pytest.mark.parametrize("depth", [90, 100, 5000])
def test_depth_is_bounded(depth: int) -> None:
    assert (literal_to_json("[" * depth + "]" * depth) is None) == (depth > 100)
    assert literal_to_json("(" * depth + "'a'" + ")" * depth) == ('"a"' if depth <= 100 else None)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('[TOOL_CALLS]f{"s": "x"}', [{"s": "x"}], ""),
        ('[TOOL_CALLS]f {"s": "x"}', [{"s": "x"}], ""),
        ('[TOOL_CALLS]f[CALL_ID]abcdefghi{"s": "x"}', [{"s": "x"}], ""),
        ('[TOOL_CALLS]f{"s": "x"}So.', [{"s": "x"}], "So."),
        ('[TOOL_CALLS]f{"s": "x"}[TOOL_CALLS]f[ARGS]{"i": 2}', [{"s": "x"}, {"i": 2}], ""),
    ],
)
def test_mistral_may_leave_out_its_marker(text: str, calls: list[dict[str, Any]], content: str) -> None:
    found = whole(StreamParser(TOOL_PARSERS.get("mistral"), None, TOOLS), text)
    assert [json.loads(call.arguments) for call in found.calls] == calls
    assert found.content == content


Q = '<|"|>'


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (f"s:{Q}sql({Q}{Q}{Q} SELECT 1 {Q}{Q}{Q}).df(){Q},i:2", {"s": 'sql(""" SELECT 1 """).df()', "i": 2}),
        (f"s:{Q}say {Q}hi{Q}, please{Q}", {"s": 'say "hi", please'}),
        (f"s:{Q}print({Q}a{Q}, {Q}b{Q}){Q}", {"s": 'print("a", "b")'}),
        (f"a:[{Q}x{Q},{Q}y {Q}z{Q} w{Q},3]", {"a": ["x", 'y "z" w', 3]}),
        (f"a:{{b:{Q}v{Q}}},s:{Q}{Q}", {"a": {"b": "v"}, "s": ""}),
        (f"s:{Q}x{Q} , k : 3 ", {"s": "x", "k": 3}),
    ],
)
def test_gemmas_delimiter_within_a_text_is_a_quote(written: str, value: dict[str, Any]) -> None:
    text = f"<|tool_call>call:f{{{written}}}<tool_call|>"
    for pieces in (text, [text], [text[:30], text[30:]]):
        found = whole(StreamParser(TOOL_PARSERS.get("gemma4"), None, TOOLS), pieces)
        assert [json.loads(call.arguments) for call in found.calls] == [value]
        assert found.content == ""


@pytest.mark.parametrize("space", ["\n", " ", "\n\n"])
def test_contents_around_a_call_are_not_joined(space: str) -> None:
    """vLLM keeps the space before a call."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    hermes = TOOL_PARSERS.get("hermes")
    for text in (f"Let me look.{space}{call}{space}Done.", f"Let me look.{call}{space}Done."):
        for pieces in (text, [text]):
            assert whole(StreamParser(hermes, None, TOOLS), pieces).content == f"Let me look.{space}Done."
    assert whole(StreamParser(hermes, None, TOOLS), f"{call}{space}Done.").content == "Done."
    assert whole(StreamParser(hermes, None, TOOLS), f"So.{space}{call}{space}").content == "So."
