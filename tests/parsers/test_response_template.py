"""A tokenizer's response_template becomes the parsers that it describes: they read what transformers reads by it."""

import json
import re
from typing import Any

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, StreamParser
from quintet.parsers.response_template import parsers_of
from tests.parsers.cutting import cut_in_two, in_bytes, whole
from tests.parsers.transcripts import TOOLS, WRITERS

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
QWEN: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"},
    },
}
HARMONY: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}
COHERE: dict[str, Any] = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
ATEM: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "content": {"close": "<|eot|>"},
        "tool_calls": {
            "open_pattern": r'<atem:invoke\b[^>]*?\bname="(?P<name>[^"]+)">',
            "close": "</atem:invoke>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r'<atem:parameter\b[^>]*?\bname="(?P<key>[^"]+)"[^>]*?>(?P<value>.*?)</atem:parameter>',
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
    },
}


def template_of(given: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a template; of a model type that which transformers itself has."""
    if isinstance(given, dict):
        return given
    serving = pytest.importorskip("transformers.cli.serving.utils")
    own = getattr(serving, "_RESPONSE_TEMPLATE_FALLBACKS", None)
    if own is None:
        pytest.skip("this release of transformers has no templates of its own")
    return next(each for types, each in own.items() if given in types)


CALLS = [("get_weather", {"city": "Bern", "days": 3}), ("now", {})]
THOUGHT = "<think>\nHm, 1 < 2.\n</think>\n\n"
TURNS: dict[str, tuple[dict[str, Any] | str, str]] = {
    "qwen3": ("qwen3", THOUGHT + "Let me see.\n" + WRITERS["hermes"](CALLS) + "<|im_end|>"),
    "qwen3_5": ("qwen3_5", THOUGHT + "Let me see.\n" + WRITERS["qwen3_coder"](CALLS) + "<|im_end|>"),
    "gemma4": ("gemma4", "<|channel>thought\nHm.<channel|>" + WRITERS["gemma4"](CALLS) + "<turn|>"),
    "gpt-oss": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Bern", "days": 3}<|call|>',
    ),
    "gpt-oss, an answer": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
    ),
    "cohere": (COHERE, "<|START_THINKING|>Hm.<|END_THINKING|>" + WRITERS["cohere_command3"](CALLS)),
    "cohere, an answer": (COHERE, "<|START_RESPONSE|>So.<|END_RESPONSE|>"),
    "atem": (ATEM, 'Well. <atem:invoke name="now">\n<atem:parameter name="text">a</atem:parameter>\n</atem:invoke>'),
}
AS_TRANSFORMERS = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS
]


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_read_as_transformers_reads_it(name: str) -> None:
    chat_parsing = pytest.importorskip("transformers.utils.chat_parsing")
    template, text = template_of(TURNS[name][0]), TURNS[name][1]
    tool, reasoning = parsers_of(template)
    found = whole(StreamParser(tool, reasoning, TOOLS), text)
    expected = chat_parsing.parse_response(text, template, prefix="", tools=AS_TRANSFORMERS)
    calls = expected.get("tool_calls", [])
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [
        (each["function"]["name"], each["function"]["arguments"])
        for each in (calls if isinstance(calls, list) else [calls])
    ]
    assert found.content == expected.get("content", "")
    assert found.reasoning == expected.get("thinking", expected.get("reasoning_content", ""))
    for pieces in (in_bytes(text), *cut_in_two(text)):
        assert whole(StreamParser(tool, reasoning, TOOLS), pieces) == found


@pytest.mark.parametrize("name", TURNS)
def test_calls_that_are_required_have_a_grammar(name: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    tool, _ = parsers_of(template_of(TURNS[name][0]))
    assert tool is not None
    grammar = tool.grammar(TOOLS)
    assert grammar is not None
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar))


def test_a_thought_that_the_prompt_begins() -> None:
    _, reasoning = parsers_of(QWEN)
    assert reasoning is not None
    assert reasoning.begins_inside("<|im_start|>assistant\n<think>\n")
    assert not reasoning.begins_inside("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def changed(field: str, **given: Any) -> dict[str, Any]:
    template = json.loads(json.dumps(QWEN))
    template["fields"].setdefault(field, {}).update(given)
    return template


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({}, "has no fields"),
        ({"fields": {"content": 1}}, "has no fields"),
        (changed("citations"), "has 'citations', which is not served"),
        (changed("tool_calls", open_pattern="(a+)+"), "has the expression '(a+)+', of which '(a+)+' is not served"),
        (changed("tool_calls", open_pattern="a(?=b)"), "of which '(?=b)' is not served"),
        (changed("tool_calls", open_pattern="(?P<name>"), "is not served"),
        (changed("tool_calls", open_pattern="(?:a|b)?" * 9), "is not served"),
        (changed("tool_calls", open_pattern="a" * 5000), "is not served"),
        (changed("tool_calls", open_pattern=r"(?P<a>\w)"), "does not begin tool_calls with a marker"),
        (changed("tool_calls", content="kv-lines"), "describes calls of tools as 'kv-lines'"),
        (changed("tool_calls", transform={"function": {"name": "f", "arguments": "{content}"}}), "that are not served"),
        (changed("tool_calls", content_args={"string_delims": [["'", "'"]]}), "JSON with changes that are not served"),
        (changed("reasoning_content", content="json"), "describes reasoning_content by other things than markers"),
        (changed("reasoning_content", close="\n"), "has line breaks alone as a marker of reasoning_content"),
        (changed("tool_calls", content_args=["a"]), "is malformed (AttributeError"),
        (changed("tool_calls", content_args={"unquoted_keys": True, "string_delims": [5]}), "is malformed (TypeError"),
    ],
)
def test_what_is_not_served_is_refused(template: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"the tokenizer's response_template .*{re.escape(why)}.*name another parser"):
        parsers_of(template)


def test_the_parser_of_a_checkpoint_needs_its_template() -> None:
    for name in ("hf", "beam"):
        for registry in (TOOL_PARSERS, REASONING_PARSERS):
            registry.check(name)
            with pytest.raises(
                ValueError, match=f"{name}' reads response_template of tokenizer_config.json, which this"
            ):
                registry.get(name)
        assert TOOL_PARSERS.get(name, HARMONY).blocks
        assert REASONING_PARSERS.get(name, HARMONY).opens == ("<|channel|>analysis<|message|>",)
    with pytest.raises(ValueError, match="response_template has no reasoning"):
        REASONING_PARSERS.get("hf", ATEM)
    assert parsers_of({"fields": {"content": {}}, "start_anchor": "<a>"}) == (None, None)
    assert whole(StreamParser(None, None), "x") == Parsed("", "x")
