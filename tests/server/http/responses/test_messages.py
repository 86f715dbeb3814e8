"""What a model says, as items, and items as what a model is told: over a fake engine that says what a test wants."""

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from quintet.chat.output_parser import OutputFormat, OutputParser
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Tool
from quintet.server.http.responses.messages import as_messages
from quintet.server.http.responses.output import OutputBuilder, ResponseEvent
from tests.server.fakes import FakeBackend
from tests.server.http.responses.responses_requests import PATH, backend, create, create_once, fail
from tests.server.http.serving import client

TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": None, "strict": None} for name in "fg"]
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


SAID: list[tuple[str, list[str]]] = [
    ("<think>Hm, well.</think>Hi", ["reasoning Hm, well.", "message Hi"]),
    ("<think>Hm.</think>Let me see.\n" + call("f", '{"a": [1, 2]}'), [
        "reasoning Hm.", "message Let me see.", 'function_call f {"a": [1, 2]}']),
    (call("f") + "\n" + call("g", '{"b": "}"}'), ["function_call f {}", 'function_call g {"b": "}"}']),
    (f"{call('f')}\nDone.", ["function_call f {}", "message Done."]),
    ("<think>Hm, and no more", ["reasoning Hm, and no more"]),
    ("", ["message "]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1', ['function_call f {"a": [1']),
    ('<tool_call>{"name": "f", "argu', ['message <tool_call>{"name": "f", "argu']),
    ("<tool_call>nothing</tool_call>", ["message <tool_call>nothing</tool_call>"]),
]  # fmt: skip


def saying(text: str, **settings: Any) -> FakeBackend:
    fake = backend(**settings)
    fake.reply = fake.encode(text)
    return fake


def shown(item: dict[str, Any]) -> str:
    """In one line."""
    if item["type"] == "function_call":
        return f"function_call {item['name']} {item['arguments']}"
    return f"{item['type']} {''.join(part['text'] for part in item['content'])}"


def told(events: list[Any]) -> list[str]:
    """The items that the deltas of a stream add up to, within their begins and ends."""
    made: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(made)
            made.append({**event["item"], "arguments": "", "content": [{"text": ""}]})
        elif kind.endswith(".delta"):
            assert event["item_id"] == made[-1]["id"] and event["output_index"] == len(made) - 1
            made[-1]["content"][0]["text"] += event["delta"]
            made[-1]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            assert shown(event["item"]) == shown(made[-1])
    return [shown(item) for item in made]


@pytest.mark.parametrize(("text", "items"), SAID)
async def test_items_come_in_the_order_in_which_they_were_said(text: str, items: list[str]) -> None:
    whole = await create_once(saying(text), tools=TOOLS)
    assert [shown(item) for item in whole["output"]] == items
    for burst in (1, 3, 100):
        made = await create_once(saying(text, burst=burst), tools=TOOLS, stream=True, **LOGPROBS)
        assert told(made) == items == [shown(item) for item in made[-1]["response"]["output"]]
        assert [each["status"] for each in made[-1]["response"]["output"]] == [
            each["status"] for each in whole["output"]
        ]


def plain(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


PIECES = [
    "<think>", "</think>", "Hm. ", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "}"}}',
    '{"name": "g', '", "arguments": {}}', "\n", " ", "{", "Let me see.", "<tool", "é👋", "[1, 2]",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(50))
def test_any_text_makes_the_same_items_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
    tools = [Tool("f", {}), Tool("g", {})]
    listening = OutputFormat(TOOL_PARSERS.get("hermes"), REASONING_PARSERS.get("qwen3"), tools)
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(20)))
    made = []
    for pieces in ([text], [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]):
        speech, output, steps = OutputParser(listening), OutputBuilder(), list[ResponseEvent]()
        for place, piece in enumerate(pieces):
            steps += output.add_events(speech.feed(piece, ended=place == len(pieces) - 1))
        steps += output.end("completed")
        events = [{"type": f"response.{kind}", **plain(fields)} for kind, fields in steps]
        items = [shown(each) for each in plain(output.items("completed"))]
        assert told(events) == items and items
        made.append([(line, each.status) for line, each in zip(items, output.items(""), strict=True)])
    assert made[0] == made[1]


async def test_a_call_that_broke_is_incomplete() -> None:
    made = await create_once(saying('<tool_call>{"name": "f", "arguments": {"a": [1'), tools=TOOLS)
    assert made["status"] == "completed" and made["output"][0]["status"] == "incomplete"


async def test_one_call_at_most_where_no_others_are_wanted() -> None:
    fake = saying(f"{call('f')}\n{call('g')}")
    made = await create_once(fake, tools=TOOLS, parallel_tool_calls=False)
    assert [shown(item) for item in made["output"]] == ["function_call f {}"]


async def test_log_probabilities_stand_with_the_message() -> None:
    fake = saying("<think>Hm.</think>Hi")
    whole = await create_once(fake, **LOGPROBS)
    made = await create_once(saying("<think>Hm.</think>Hi"), stream=True, **LOGPROBS)
    scores = whole["output"][1]["content"][0]["logprobs"]
    assert len(scores) == whole["usage"]["output_tokens"]
    assert scores == made[-1]["response"]["output"][1]["content"][0]["logprobs"]


async def test_a_conversation_with_calls_loses_whole_turns() -> None:
    """What is cut begins with a user's message: no output is left without its call."""
    turn: list[Any] = [
        {"role": "user", "content": "word " * 40},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "word " * 40},
    ]
    fake = backend()
    async with client(fake) as http:
        last = {"role": "user", "content": "And?"}
        await create(http, input=[*turn * 8, last], truncation="auto", max_output_tokens=9)
        error = await fail(http, "POST", PATH, json={"input": [*turn * 8, last]})
    text = fake.submitted[0].prompt.text or ""
    assert text.startswith("<s><|user|>word") and text.count("<|tool|>") == text.count("<tool_call>") >= 1
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"


def item(kind: str, **fields: Any) -> dict[str, Any]:
    if kind == "message":
        fields["content"] = [{"type": "output_text", "text": fields["content"]}]
    if kind == "reasoning":
        fields = {"content": [{"type": "reasoning_text", "text": fields["content"]}], "summary": []}
    return {"type": kind, "status": "completed", **fields}


def test_what_an_assistant_does_in_a_row_is_one_message() -> None:
    made = as_messages(
        [
            item("message", role="user", content="One?"),
            item("reasoning", content="Hm."),
            item("message", role="assistant", content="Let me see."),
            item("function_call", call_id="a", name="f", arguments='{"x": 1}'),
            item("function_call", call_id="b", name="g", arguments=""),
            item("function_call_output", call_id="a", output="1"),
            item("function_call_output", call_id="b", output=[{"type": "input_text", "text": "2"}]),
            item("reasoning", content="So."),
            item("function_call", call_id="c", name="f", arguments="{}"),
            {**item("function_call", call_id="d", name="f", arguments="{"), "status": "incomplete"},
            item("function_call_output", call_id="c", output=""),
            item("message", role="assistant", content="Done."),
            item("message", role="assistant", content="Really."),
        ]
    )
    assert [message["role"] for message in made] == [
        "user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "assistant",
    ]  # fmt: skip
    first, second = made[1], made[4]
    assert first["reasoning_content"] == "Hm." and first["content"] == [{"type": "text", "text": "Let me see."}]
    assert [each["id"] for each in first["tool_calls"]] == ["a", "b"]
    assert [each["function"]["arguments"] for each in first["tool_calls"]] == [{"x": 1}, {}]
    assert made[3] == {"role": "tool", "tool_call_id": "b", "name": "g", "content": [{"type": "text", "text": "2"}]}
    assert "content" not in second and second["reasoning_content"] == "So." and len(second["tool_calls"]) == 1


async def test_a_call_that_is_no_text_is_incomplete_and_the_conversation_goes_on() -> None:
    async with client(saying(call("f", '{"a": "\\ud83d"}'))) as http:
        answer = await create(http, tools=TOOLS)
        assert [(each["type"], each["status"]) for each in answer["output"]] == [("function_call", "incomplete")]
        await create(http, tools=TOOLS, previous_response_id=answer["id"], input="Go on")
