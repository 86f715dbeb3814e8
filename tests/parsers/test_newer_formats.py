"""Formats of which a transcript shows too little: messages with recipients, nested elements, several notations."""

import json
from typing import Any

import pytest

from quintet.chat.output_parser import OutputFormat, OutputParser
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, StreamParser, Tool, ToolCall, gather, parse
from tests.parsers.cutting import cut_in_two, in_bytes, whole

WEATHER = Tool(
    "get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
)
ZURICH = ToolCall("get_weather", '{"city": "Zürich", "days": 3}')


def read(name: str, text: str, tools: Any = (WEATHER,), inside: bool | None = None) -> Parsed:
    """Returns what the two parsers of that name read, however the text is cut."""
    tool = TOOL_PARSERS.get(name) if name in TOOL_PARSERS.names() else None
    reasoning = REASONING_PARSERS.get(name) if name in REASONING_PARSERS.names() else None
    expected = parse(text, tool, reasoning, tools, inside)
    for pieces in (in_bytes(text), *cut_in_two(text)):
        assert whole(StreamParser(tool, reasoning, tools, inside), pieces) == expected
    return expected


ATEM = (
    '<atem:function_calls>\n<atem:invoke name="{}">\n<atem:parameter name="city">Zürich</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


@pytest.mark.parametrize("name", ["muse", "muse_glimmer", "musespark1x"])
def test_a_message_is_what_its_recipient_says(name: str) -> None:
    call = ATEM.format("get_weather")
    text = (
        f" to=self<|message|>I might write {call}<|eom|>"
        "<|start|>assistant to=commentary<|message|>I look.<|eom|>"
        f"<|start|>assistant to=get_weather<|message|>{call}<|eom|>"
        f"<|start|>assistant to=get_weather<|message|>{call}<|eot|>"
    )
    assert read(name, text) == Parsed(f"I might write {call}", "I look.", (ZURICH, ZURICH))
    text = f" to=self<|message|>A.<|eom|><|start|>assistant to=user<|message|>As {call} to=x.<|eot|>"
    assert read(name, text) == Parsed("A.", f"As {call} to=x.")
    text = f" to=self<|message|>A. to=get_weather<|message|>{call}"  # without the end of the thought
    assert read(name, text) == Parsed("A.", "", (ZURICH,))


@pytest.mark.parametrize("text", ["", " to=user<|message|>Yes.<|eom|><|start|>assistant"])
def test_a_cut_header_of_muse_is_no_content(text: str) -> None:
    shown = "Yes." if text else ""
    for at in range(len(header := " to=commentary<|message|>")):
        for size in (1, 100):
            parser, whole = OutputParser(OutputFormat(TOOL_PARSERS.get("muse"))), text + header[:at]
            events = [each for i in range(0, len(whole), size) for each in parser.feed(whole[i : i + size], False)]
            assert gather(events + parser.feed("", True, cut=True)).content.strip() == shown, header[:at]
    parser = OutputParser(OutputFormat(TOOL_PARSERS.get("muse")))
    assert gather(parser.feed(" to=user<|message|>to", True, cut=True)).content == "to"  # a word


def test_a_message_of_muse_without_a_recipient() -> None:
    assert read("muse", "<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>So.") == Parsed("Hm.", "So.")
    assert read("muse_glimmer", "<|message|>So.<|eot|>") == Parsed("", "So.")


@pytest.mark.parametrize(
    ("written", "called"),
    [("get_weather.get_weather", "get_weather"), ("weather.get", "weather.get"), ("other.other", "other.other")],
)
def test_a_name_that_muse_doubles_is_that_of_its_tool(written: str, called: str) -> None:
    found = read("muse", f" to={written}<|message|>{ATEM.format(written)}")
    assert [call.name for call in found.calls] == [called]


INKLING = '<|content_invoke_tool_json|>{"name":"get_weather","args":{"city":"Zürich","days":3}}<|end_message|>'
COMPACT = ToolCall("get_weather", '{"city": "Zürich", "days": 3}')


@pytest.mark.parametrize("header", ["", "get_weather"])
def test_the_header_of_an_inkling_message_is_no_content(header: str) -> None:
    thought, end = "<|content_thinking|>Hm.<|end_message|>", "<|content_model_end_sampling|>"
    said = "<|content_text|>get_weather is it.<|end_message|>"
    other = INKLING.replace("get_weather", "another")
    assert read("inkling", f"{header}{INKLING}{end}") == Parsed("", "", (COMPACT,))
    text = f"{thought}<|message_model|>{said}<|message_model|>{header}{INKLING}<|message_model|>{other}{end}"
    found = read("inkling", text)
    assert found == Parsed("Hm.", "get_weather is it.", (COMPACT, ToolCall("another", COMPACT.arguments)))
    found = read("inkling", f"{said}<|message_model|>{thought}<|message_model|>another{other}<|message_model|>{said}")
    assert (found.reasoning, found.calls) == ("Hm.", (ToolCall("another", COMPACT.arguments),))
    assert found.content == "get_weather is it." * 2


IFM = "<ifm|tool_calls>\n<ifm|tool_call>{}</ifm|tool_call>\n</ifm|tool_calls>"
TYPED = "<ifm|arg_key>{}</ifm|arg_key>\n<ifm|arg_type>{}</ifm|arg_type>\n<ifm|arg_value>{}</ifm|arg_value>\n"


def test_the_notations_of_k2_horizon() -> None:
    written = json.dumps({"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}, ensure_ascii=False)
    assert read("k2_horizon", IFM.format(written)).calls == (ZURICH,)
    typed = "get_weather\n" + TYPED.format("city", "string", "Zürich") + TYPED.format("days", "string", "3")
    assert read("k2_horizon", IFM.format(typed)).calls == (ZURICH,)  # the schema counts
    undescribed = "f\n" + TYPED.format("id", "string", "12") + TYPED.format("l", "array[integer]", "[1]")
    assert read("k2_horizon", IFM.format(undescribed)).calls == (ToolCall("f", '{"id": "12", "l": [1]}'),)
    assert read("k2_horizon", IFM.format("now")) == Parsed("", "", (ToolCall("now", "{}"),))


@pytest.mark.parametrize("mark", ["think", "think_fast", "think_faster"])
def test_a_call_ends_a_thought_of_k2_horizon(mark: str) -> None:
    call = IFM.format("now")
    assert read("k2_horizon", f"<ifm|{mark}>\nHm.{call}") == Parsed("Hm.", "", (ToolCall("now", "{}"),))
    assert read("k2_horizon", f"Hm.</ifm|{mark}>So.", inside=True) == Parsed("Hm.", "So.")


def test_a_call_of_dots_in_json() -> None:
    text = 'Well.\n<dots_function_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n'
    assert read("dots", f"{text}</dots_function_call>") == Parsed("", "Well.", (ZURICH,))


def test_thoughts_that_are_shown_stay_in_the_content() -> None:
    tool, reasoning = TOOL_PARSERS.get("minimax_m2"), REASONING_PARSERS.get("minimax_m2_append_think")
    text = "\nHm.\n</think>\n\nSo."
    assert read("minimax_m2_append_think", text).content == f"<think>{text}"
    assert read("minimax_m2_append_think", text, inside=False).content == text
    call = '\n\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    found = parse(f"Hm.</think>{call}", tool, reasoning)
    assert found == Parsed("", "<think>Hm.</think>", (ToolCall("now", "{}"),))


M3 = "]<]minimax[>["
ORDER = Tool(
    "order",
    {
        "properties": {
            "items": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/item"}}, {"type": "null"}]},
            "note": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object", "additionalProperties": {"type": "number"}},
            "free": {"type": "object"},
        },
        "$defs": {"item": {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}},
    },
)


def elements(text: str) -> str:
    """A call of `order`: the mark stands before each tag."""
    return f'<tool_call>\n<invoke name="order">{text}</invoke>\n</tool_call>'.replace("<", f"{M3}<")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<items><item><sku>1</sku><count>2</count></item></items>", {"items": [{"sku": "1", "count": 2}]}),
        ("\n<items>\n<item><sku> a </sku></item>\n</items>\n", {"items": [{"sku": " a "}]}),
        ("<items>null</items><tags></tags>", {"items": None, "tags": []}),
        ("<tags><item>a</item><item></item></tags>", {"tags": ["a", ""]}),
        ("<more><a>1</a><b>2.5</b></more>", {"more": {"a": 1, "b": 2.5}}),
        ('<more>{"a": 1}</more><more></more>', {"more": {}}),
        ("<free><a>1</a><b><item>x</item></b></free>", {"free": {"a": "1", "b": ["x"]}}),
        ("<free><a>1</a><a>2</a></free>", {"free": {"a": ["1", "2"]}}),
        ("<other>a]] > b</other>", {"other": "a]] > b"}),
        ("", {}),
    ],
)
def test_elements_are_read_by_the_schema(text: str, arguments: dict[str, Any]) -> None:
    (call,) = read("minimax_m3", elements(text), [ORDER]).calls
    assert call.complete
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "<note>a</more>",
        "<note>a",
        "<items>x<item></item></items>",
        "<></>",
        "</note>",
        "<a>" * 200 + "</a>" * 200,
        "<free><a></invoke>",
    ],
)
def test_broken_elements_are_no_call(text: str) -> None:
    found = parse(elements(text), TOOL_PARSERS.get("minimax_m3"), None, [ORDER])
    assert not any(call.complete for call in found.calls)
    streamed = StreamParser(TOOL_PARSERS.get("minimax_m3"), None, [ORDER], whole_calls=True)
    assert whole(streamed, in_bytes(elements(text))) == Parsed("", elements(text))
