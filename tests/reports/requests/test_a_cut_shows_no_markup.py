"""What max_tokens, a stop string or an abort leaves open is no content, and nothing is invented (report 13)."""

import json
from typing import Any

import pytest

from quintet.chat.output_parser import OutputFormat, OutputParser, is_cut_off
from quintet.outputs import CompletionOutput
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Event, Parsed, gather, parse
from quintet.parsers.tool_formats import TOOL_FORMATS
from tests.parsers.transcripts import ALONE, TOOLS, WEATHER, WRITERS
from tests.server.fakes import FakeBackend, bundled_tokenizer
from tests.server.http.serving import client

WORDS = ("gigachat3", "phi4_mini_json")  # markers, or their ends, begin with words that an answer may have
NAMES = sorted(name for name in WRITERS if name not in WORDS)


def events(name: str, text: str, whole: bool, size: int, reasoning: str = "") -> list[Event]:
    thinks = REASONING_PARSERS.get(reasoning) if reasoning else None
    parser = OutputParser(OutputFormat(TOOL_PARSERS.get(name), thinks, TOOLS), whole)
    found = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size], False)]
    return found + parser.feed("", True, cut=True)


@pytest.mark.parametrize("name", NAMES)
def test_no_beginning_of_a_call_is_content(name: str) -> None:
    """report 13: at every character, and behind a complete call (kimi_k2 required)."""
    before = "" if name in ALONE else "Let me look."
    text = before + WRITERS[name]([WEATHER, ("now", {})])
    calls = parse(text, TOOL_PARSERS.get(name), None, TOOLS).calls
    for at in range(len(before), len(text)):
        pieces, whole = (gather(events(name, text[:at], whole, 3)) for whole in (False, True))
        assert pieces.content.strip() == whole.content.strip() == before, text[:at]
        assert [(call.name, call.arguments) for call in pieces.calls] == [
            (call.name, call.arguments) for call in whole.calls
        ]
        for call, full in zip(whole.calls, calls, strict=False):
            assert call.name == full.name and full.arguments.startswith(call.arguments)
            assert not call.complete or json.loads(call.arguments) == json.loads(full.arguments)


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "openai"])
def test_no_beginning_of_another_marker_is_content(name: str) -> None:
    reasoning = {"hermes": "qwen3", "kimi_k2": "kimi_k2", "openai": "openai_gptoss"}[name]
    thinks = REASONING_PARSERS.get(reasoning)
    text = f"{thinks.opens[0]}Hm.{thinks.closes[0]}"
    for at in range(1, len(text) + 1):
        found = gather(events(name, text[:at], True, 2, reasoning))
        assert found.content == "" and "<" not in found.reasoning, text[:at]


@pytest.mark.parametrize("text", ["a < b", "[1", "It is {", "use <b>"])
def test_words_are_not_taken_away(text: str) -> None:
    assert gather(events("hermes", text, True, 1)) == Parsed(content=text)
    assert gather(events("hermes", text, False, 1)) == Parsed(content=text)


def test_an_answer_that_the_model_ended_is_shown() -> None:
    parser = OutputParser(OutputFormat(TOOL_PARSERS.get("hermes")))
    assert gather(parser.feed("The tag is <tool_call>", True)) == Parsed(content="The tag is <tool_call>")


def test_code_that_may_be_an_answer_is_shown() -> None:
    text = '```json\n[{"title": "Anna'
    assert gather(events("xlam", text, True, 5)).content == text
    assert TOOL_FORMATS["xlam"].blocks[1].code


def test_a_cut_is_what_the_model_did_not_end() -> None:
    assert is_cut_off(CompletionOutput(0, "", (), finish_reason="length"))
    assert is_cut_off(CompletionOutput(0, "", (), finish_reason="abort"))
    assert is_cut_off(CompletionOutput(0, "", (), finish_reason="stop", stop_reason="}"))
    assert not is_cut_off(CompletionOutput(0, "", (), finish_reason="stop"))
    assert not is_cut_off(CompletionOutput(0, "", ()))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "city": {"type": "string"}}}
QUESTION = [{"role": "user", "content": "Hi"}]


def saying(text: str) -> FakeBackend:
    return FakeBackend(reply=bundled_tokenizer().encode(text, add_special_tokens=False))


async def post(path: str, body: dict[str, Any]) -> Any:
    async with client(saying(CALL)) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text if body.get("stream") else answer.json()


LENGTH = len(bundled_tokenizer().encode(CALL, add_special_tokens=False))
FUNCTION = {"name": "f", "parameters": SCHEMA}
CHOICES = ["auto", "required", {"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
async def test_chats_are_alike_streamed_and_whole(choice: Any) -> None:
    body = {"messages": QUESTION, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
    for cut in [{"max_tokens": most} for most in range(1, LENGTH + 1, 3)] + [{"stop": stop} for stop in ("ame", "Par")]:
        made = (await post("/v1/chat/completions", {**body, **cut}))["choices"][0]
        text = await post("/v1/chat/completions", {**body, **cut, "stream": True})
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n")[:-2]]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part.get("arguments", "") for part in parts) == "".join(
            call["function"]["arguments"] for call in made["message"].get("tool_calls", ())
        )
        assert not made["message"]["content"], (cut, made)
        assert not "".join(delta.get("content") or "" for delta in deltas)
        assert made["finish_reason"] == ("length" if "max_tokens" in cut else "stop")


async def test_messages_have_no_markup_and_no_arguments_that_were_not_written() -> None:
    tool = {"name": "f", "input_schema": SCHEMA}
    for most in range(1, LENGTH):
        body = {"messages": QUESTION, "tools": [tool], "max_tokens": most}
        made = await post("/v1/messages", body)
        assert all(block["type"] == "tool_use" for block in made["content"]), made
        for block in made["content"]:
            assert block["input"].items() <= {"a": 1, "city": "Paris"}.items(), (most, block)
        assert '"text_delta"' not in await post("/v1/messages", {**body, "stream": True})


async def test_responses_have_no_markup() -> None:
    body = {"input": "Hi", "tools": [{"type": "function", **FUNCTION}], "store": False}
    for most in (16, 20, 24):
        made = await post("/v1/responses", {**body, "max_output_tokens": most})
        for item in made["output"]:
            assert item["type"] == "function_call" or item["content"][0]["text"] == "", made
        text = await post("/v1/responses", {**body, "max_output_tokens": most, "stream": True})
        assert "response.output_text.delta" not in text
