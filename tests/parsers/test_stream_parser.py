"""What is given when: as much as is certain, and no more; thoughts, markers and the space beside them."""

import json

import pytest

from quintet.parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Parsed,
    Reasoning,
    StreamParser,
    Tool,
    ToolCall,
    parse,
)
from quintet.parsers.call_events import MAX_CALLS
from quintet.parsers.reasoning_formats import REASONING_FORMATS
from quintet.parsers.stream_parser import MAX_HELD
from quintet.parsers.value_reader import MAX_DEPTH, MAX_NAME
from tests.parsers.cutting import whole

HERMES = TOOL_PARSERS.get("hermes")
QWEN = REASONING_PARSERS.get("qwen3")
R1 = REASONING_PARSERS.get("deepseek_r1")


def test_what_may_become_a_marker_is_held_back_and_nothing_else() -> None:
    splitter = StreamParser(HERMES)
    assert splitter.feed("a <b> <tool") == [Content("a <b>")]
    assert splitter.feed("_cal") == []
    assert splitter.feed("m ") == [Content(" <tool_calm")]
    assert splitter.feed("x") == [Content(" x")]
    assert splitter.feed("<tool_call>") == []
    assert splitter.finish() == [Content("<tool_call>")]


def test_a_call_is_announced_once_its_arguments_have_begun() -> None:
    splitter = StreamParser(HERMES)
    assert splitter.feed('Hi\n<tool_call>\n{"name": "f", "arguments": {') == [Content("Hi")]
    assert splitter.feed('"a": "x') == [CallBegin(0, "f"), CallArguments(0, '{"a": "x')]
    assert splitter.feed('y", "b') == [CallArguments(0, 'y"')]
    assert splitter.feed('": 1}') == [CallArguments(0, ', "b": 1}')]
    assert splitter.feed("}") == [CallEnd(0)]
    assert splitter.feed("\n</tool_call>\n") == []
    assert splitter.finish() == []


def test_an_argument_in_xml_comes_as_it_is_written() -> None:
    splitter = StreamParser(TOOL_PARSERS.get("qwen3_coder"))
    splitter.feed("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert splitter.feed('one "') == [CallArguments(0, 'one \\"')]
    assert splitter.feed("\n</param") == []
    assert splitter.feed("x") == [CallArguments(0, "\\n</paramx")]


def test_arguments_may_come_before_the_name() -> None:
    found = parse('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', HERMES)
    assert found.calls == (ToolCall("f", '{"a": 1}'),)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"{\\"a\\": \\"é\\"}"', '{"a": "é"}'),  # an object in a string
        ("null", "{}"),
        ('{ "a" :\n[ ] }', '{"a": []}'),
        ('{"a": "\\u00e9\\n\\/"}', '{"a": "\\u00e9\\n\\/"}'),
        ('{"a": "two\nlines"}', '{"a": "two\\nlines"}'),
    ],
)
def test_arguments_are_an_object_however_they_are_written(written: str, arguments: str) -> None:
    found = parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>', HERMES)
    assert found == Parsed(calls=(ToolCall("f", arguments),))
    assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("written", ["[1]", "1", '"text"', "{1: 2}", '{"a": 01}', '{"a": }', "{'a': 1}", "nul"])
def test_what_is_no_object_is_content(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    found = parse(text, HERMES)
    assert all(not call.complete for call in found.calls)
    assert found.calls or found.content == text


def test_a_forgotten_brace_costs_nothing_else() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\nSo.'
    assert parse(text, HERMES) == Parsed(content="So.", calls=(ToolCall("f", '{"a": 1}'),))


def test_keys_of_a_call_that_say_nothing_are_passed_over() -> None:
    found = parse('<tool_call>{"id": 7, "x": {"y": [1]}, "name": "f"}</tool_call>', HERMES)
    assert found.calls == (ToolCall("f", "{}"),)


def test_an_answer_in_json_is_no_call() -> None:
    """Without a marker, a key that no call has tells at once."""
    splitter = StreamParser(TOOL_PARSERS.get("llama3_json"))
    assert splitter.feed('{"name": "Ann", ') == []
    assert splitter.feed('"age": ') == [Content('{"name": "Ann", "age":')]
    found = parse('{"name": "Ann", "age": 4}', TOOL_PARSERS.get("llama3_json"))
    assert found == Parsed(content='{"name": "Ann", "age": 4}')


def test_calls_without_a_marker_stand_at_the_beginning() -> None:
    call = '{"name": "f", "parameters": {}}'
    llama = TOOL_PARSERS.get("llama3_json")
    assert len(parse(f" {call}", llama).calls) == 1
    assert parse(f"Look: {call}", llama) == Parsed(content=f"Look: {call}")
    assert len(parse(f"Look: <|python_tag|>{call}", llama).calls) == 1
    assert len(parse(f"hm</think>\n{call}", llama, R1).calls) == 1


def test_a_thought_needs_no_marker_where_the_prompt_began_it() -> None:
    assert parse("hm\n</think>\n\nyes", None, R1) == Parsed("hm", "yes")
    assert parse("<think>\nhm</think>yes", None, R1) == Parsed("hm", "yes")
    assert parse("hm", None, R1) == Parsed("hm", "")
    assert parse("yes", None, R1, inside=False) == Parsed("", "yes")
    assert parse("yes", None, QWEN) == Parsed("", "yes")
    assert parse("hm</think>yes", None, QWEN, inside=True) == Parsed("hm", "yes")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [("<|im_start|>assistant\n", False), ("assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False)],
)
def test_the_prompt_tells_whether_a_thought_has_begun(prompt: str, inside: bool) -> None:
    assert QWEN.begins_inside(prompt) == inside
    assert R1.begins_inside(prompt) == (inside or "think" not in prompt)


def test_a_marker_of_a_thought_in_the_middle_of_content_is_content() -> None:
    assert parse("write <think> first", None, QWEN) == Parsed(content="write <think> first")


def test_reasoning_comes_as_it_is_thought() -> None:
    splitter = StreamParser(None, QWEN)
    assert splitter.feed("<think>\nI ") == [Reasoning("I")]
    assert splitter.feed("think </th") == [Reasoning(" think")]
    assert splitter.feed("ink>\n\nSo") == [Content("So")]
    assert splitter.finish() == []


def test_a_call_ends_a_thought_where_the_model_does_so() -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    found = parse(f"hm {call}<|tool_calls_section_end|>", TOOL_PARSERS.get("kimi_k2"), REASONING_PARSERS.get("kimi_k2"))
    assert found == Parsed("hm", "", (ToolCall("f", "{}"),))


THOUGHTS = {
    "kimi_k3": "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>",
    "solar_open2": "<|think:start|>hm<|think:end|>yes",
    "minimax_m3": "<mm:think>hm</mm:think>yes",
    "hy_v3": "<think:opensource>hm</think:opensource>yes",
    "hunyuan_a13b": "<think>\nhm\n</think>\n<answer>\nyes\n</answer>",
    "ernie45": "hm\n</think>\n\n<response>\nyes\n</response>\n",
    "granite": "Here is my thought process:\nhm\n\nHere is my response:\nyes",
    "mistral": "[THINK]hm[/THINK]yes",
    "seed_oss": "<seed:think>hm</seed:think>yes",
    "gemma4": "<|channel>thought\nhm<channel|>yes",
    "cohere_command3": "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>",
    "apertus": "<|inner_prefix|>hm<|inner_suffix|>yes",
    "longcat": "<longcat_think>\nhm\n</longcat_think>\nyes",
    "kimi_k2": "◁think▷hm◁/think▷yes",
    "openai_gptoss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
    "qwen3": "<think>\nhm\n</think>\n\nyes",
    "inkling": "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>yes<|end_message|>",
    "muse": " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>yes<|eot|>",
    "muse_glimmer": " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>yes<|eot|>",
    "plamo3": "<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>yes<|plamo:tag|>",
    "k2_horizon": "<ifm|think_fast>\nhm\n</ifm|think_fast>\nyes",
    "deepseek_r1": "hm\n</think>\n\nyes",
}


def test_each_way_to_think() -> None:
    assert {name: parse(text, None, REASONING_PARSERS.get(name)) for name, text in THOUGHTS.items()} == {
        name: Parsed("hm", "yes") for name, parser in REASONING_FORMATS.items() if not parser.shown
    }


HARMONY = (TOOL_PARSERS.get("openai"), REASONING_PARSERS.get("openai_gptoss"))


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert parse(text, *HARMONY) == Parsed("Think.", "I look it up.", (ToolCall("f", '{"a": 1}'),))
    again = "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>"
    assert parse(again + "<|start|>assistant<|channel|>final<|message|>C.<|return|>", *HARMONY) == Parsed("A.B.", "C.")


def test_both_of_mistrals_forms() -> None:
    mistral = TOOL_PARSERS.get("mistral")
    calls = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    listed = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert parse(listed, mistral).calls == calls
    assert parse('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', mistral).calls == calls
    assert parse("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", mistral).calls == (ToolCall("f", "{}", "abcdefghi"),)


def test_an_id_is_made_as_the_models_template_wants_it() -> None:
    assert len(TOOL_PARSERS.get("mistral").call_id("f", 0)) == 9
    assert TOOL_PARSERS.get("mistral").call_id("f", 0).isalnum()
    assert TOOL_PARSERS.get("kimi_k2").call_id("f", 3) == "functions.f:3"
    assert len({HERMES.call_id("f", 0) for _ in range(10)}) == 10


def test_a_value_in_cdata_may_hold_its_own_marker() -> None:
    text = (
        '<function name="f"><param name="a"><![CDATA[x </param> ]] > y]]></param><param name="b">z</param></function>'
    )
    expected = (ToolCall("f", '{"a": "x </param> ]] > y", "b": "z"}'),)
    assert parse(text, TOOL_PARSERS.get("minicpm5")).calls == expected
    assert whole(StreamParser(TOOL_PARSERS.get("minicpm5")), text).calls == expected


def test_markers_of_a_checkpoint_may_have_a_suffix() -> None:
    for mark in ("", ":opensource"):
        text = f"<tool_calls{mark}><tool_call{mark}>f<tool_sep{mark}></tool_call{mark}></tool_calls{mark}>"
        assert parse(text, TOOL_PARSERS.get("hy_v3")) == Parsed(calls=(ToolCall("f", "{}"),))


def test_sizes_are_bounded() -> None:
    def call(arguments: str, name: str = "f") -> str:
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    def nested(depth: int) -> str:
        return '{"a": ' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert parse(call(nested(MAX_DEPTH)), HERMES).calls[0].complete
    assert not parse(call(nested(MAX_DEPTH + 1)), HERMES).calls[0].complete
    assert len(parse(call("{}") * (MAX_CALLS + 3), HERMES).calls) == MAX_CALLS
    glm = TOOL_PARSERS.get("glm45")
    assert parse(f"<tool_call>{'f' * MAX_NAME}</tool_call>", glm).calls
    too_long = f"<tool_call>{'f' * (MAX_NAME + 1)}</tool_call>"
    assert parse(too_long, glm) == Parsed(content=too_long)


def test_what_is_held_for_a_call_is_bounded() -> None:
    """Arguments that come before the name are held; past the bound they are content, wherever the text is cut."""
    head, tail = '<tool_call>{"arguments": {"a": "', '"}, "name": "f"}</tool_call>'
    room = MAX_HELD - len(head) - len(tail) + len("}</tool_call>")
    assert parse(head + "x" * room + tail, HERMES).calls[0].complete
    after = '<tool_call>{"name": "g"}</tool_call>'
    text = head + "x" * (room + 1) + tail + after
    expected = Parsed(content=text.removesuffix(after), calls=(ToolCall("g", "{}"),))
    assert parse(text, HERMES) == expected
    assert whole(StreamParser(HERMES), [text[at : at + 77_777] for at in range(0, len(text), 77_777)]) == expected


def test_a_tool_says_how_its_arguments_are_read() -> None:
    tool = Tool("f", {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    fields = "".join(f"<arg_key>{key}</arg_key><arg_value>5</arg_value>" for key in "ns")
    text = f"<tool_call>f{fields}</tool_call>"
    assert parse(text, TOOL_PARSERS.get("glm47"), None, [tool]).calls == (ToolCall("f", '{"n": 5, "s": "5"}'),)
