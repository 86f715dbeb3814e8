"""Text up to a second end of a thought is thought where a budget set the first (claim 8)."""

import json
from typing import Any

import pytest

from quintet.chat.output_parser import MAX_LATE
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, StreamParser
from tests.parsers.cutting import whole
from tests.server.fakes import FakeBackend, bundled_tokenizer
from tests.server.http.serving import client, events

QWEN = REASONING_PARSERS.get("qwen3")
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def parser(most: int = 100, inside: bool = True) -> StreamParser:
    return StreamParser(TOOL_PARSERS.get("hermes"), QWEN, (), inside, late_end=most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 2</think>+ 5 = 10, write 0</think>72", Parsed("2 + 2+ 5 = 10, write 0", "72")),
        ("</think>+ 5 = 10</think>\n\n72", Parsed("+ 5 = 10", "72")),
        ("Hm.</think>72", Parsed("Hm.", "72")),
        ("Hm.</think>72 </think> is 70 </think> + 2", Parsed("Hm.72", "is 70+ 2")),
        ("Hm.", Parsed("Hm.", "")),
        ("</think>", Parsed()),
    ],
)
def test_a_second_end_makes_it_thought(text: str, expected: Parsed) -> None:
    for pieces in (text, [text]):
        assert whole(parser(), pieces) == expected


def test_what_is_longer_or_before_a_call_is_content() -> None:
    for pieces in (text := "Hm.</think>" + "ab " * 40 + "</think>So.", [text]):
        found = whole(parser(), pieces)
        assert (found.reasoning, found.content) == ("Hm.", "ab " * 39 + "ab" + "So.")
    for pieces in (text := f"Hm.</think>Look.\n{CALL}\n</think>So.", [text]):
        found = whole(parser(), pieces)
        assert (found.reasoning, found.content, len(found.calls)) == ("Hm.", "Look.\nSo.", 1)


def test_without_a_budget_nothing_is_held() -> None:
    splitter = StreamParser(None, QWEN, (), True)
    assert [event.text for event in splitter.feed("Hm.</think>The tag ")] == ["Hm.", "The tag"]  # type: ignore[union-attr]
    assert whole(StreamParser(None, QWEN, (), True), "a</think>b</think>c") == Parsed("a", "b</think>c")


def test_content_comes_as_soon_as_it_is_too_long() -> None:
    splitter = parser(5)
    assert splitter.feed("</think>ab") == []
    assert [event.text for event in splitter.feed("cdef")] == ["abcdef"]  # type: ignore[union-attr]


TEXT = "<think>2 + 2</think>+ 5 = 10, write 0</think>72"
QUESTION = [{"role": "user", "content": "Hi"}]


def saying(text: str = TEXT) -> FakeBackend:
    return FakeBackend(reply=bundled_tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("budget", [0, 3])
async def test_chats_are_alike_streamed_and_whole(budget: int) -> None:
    body: dict[str, Any] = {"messages": QUESTION, "thinking_token_budget": budget}
    async with client(saying()) as http:
        made = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        text = (await http.post("/v1/chat/completions", json={**body, "stream": True})).text
    assert made["content"] == "72" and made["reasoning"] == "2 + 2+ 5 = 10, write 0"
    deltas = [chunk["choices"][0]["delta"] for chunk in events(text)]
    for key in ("content", "reasoning"):
        assert "".join(delta.get(key) or "" for delta in deltas) == made[key]


async def test_messages_and_responses_do_so_too() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with client(saying()) as http:
        made = await http.post("/v1/messages", json={"messages": QUESTION, "thinking": thinking, "max_tokens": 2000})
        response = await http.post("/v1/responses", json={"input": "Hi", "thinking_token_budget": 3, "store": False})
    assert made.status_code == 200, made.text
    assert [block.get("text") for block in made.json()["content"] if block["type"] == "text"] == ["72"]
    last = response.json()["output"][-1]
    assert last["content"][0]["text"] == "72", json.dumps(last)
    assert MAX_LATE > len(TEXT)


async def test_without_a_budget_the_marker_is_content() -> None:
    async with client(saying()) as http:
        made = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()["choices"][0]["message"]
    assert made["content"] == "+ 5 = 10, write 0</think>72"
