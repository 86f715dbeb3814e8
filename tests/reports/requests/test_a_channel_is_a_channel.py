"""A thought ends at a call; a chunk has a thought, words or calls, never two of them (report 12 and the kinds)."""

import json
from typing import Any

import pytest

from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsed, StreamParser, gather, parse
from tests.parsers.cutting import split, whole
from tests.parsers.transcripts import ALONE, TOOLS, WEATHER, WRITERS, Asked
from tests.server.fakes import FakeBackend, bundled_tokenizer
from tests.server.http.serving import client, events

CALLS: list[Asked] = [WEATHER, ("now", {})]
QWEN, HERMES = REASONING_PARSERS.get("qwen3"), TOOL_PARSERS.get("hermes")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in ALONE and name != "openai"])
def test_a_thought_that_is_never_closed_ends_at_the_call(name: str) -> None:
    tool = TOOL_PARSERS.get(name)
    text = f"<think>I should look.\n{WRITERS[name](CALLS)}"
    for pieces in (text, [text]):
        found = whole(StreamParser(tool, QWEN, TOOLS), pieces)
        assert [call.name for call in found.calls] == [called for called, _ in CALLS]
        assert (found.reasoning, found.content) == ("I should look.", "")


def test_so_does_one_that_the_prompt_began() -> None:
    for reasoning in ("qwen3", "deepseek_r1", "kimi_k2", "seed_oss"):
        found = parse(f"Hm.\n{CALL}", HERMES, REASONING_PARSERS.get(reasoning), (), inside=True)
        assert (found.reasoning, len(found.calls), found.content) == ("Hm.", 1, "")


@pytest.mark.parametrize("mention", ["<tool_call> is the marker", "<tool_call>{not json}", "a <tool_call"])
def test_a_mention_of_the_marker_ends_no_thought(mention: str) -> None:
    text = f"<think>{mention}, so.</think>Yes."
    for pieces in (text, [text]):
        assert whole(StreamParser(HERMES, QWEN), pieces) == Parsed(f"{mention}, so.", "Yes.")


def test_the_end_of_a_thought_behind_a_call_is_no_content() -> None:
    for pieces in (text := f"<think>Hm.\n{CALL}\n</think>\nYes.", [text]):
        found = whole(StreamParser(HERMES, QWEN), pieces)
        assert (found.reasoning, found.content, len(found.calls)) == ("Hm.", "Yes.", 1)


def test_pieces_say_the_same() -> None:
    text = f"<think>Hm.\n{CALL}\n"
    assert gather(split(StreamParser(HERMES, QWEN), text)) == parse(text, HERMES, QWEN)


TEXT = f"<think>Hm, so.</think>Let me look.\n{CALL}\n{CALL}\nDone."
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "return_token_ids": True,
    "max_tokens": 400,
}


@pytest.mark.parametrize("burst", [1, 2, 5, 16, 400])
async def test_a_chunk_has_one_channel(burst: int) -> None:
    ids = bundled_tokenizer().encode(TEXT, add_special_tokens=False)
    async with client(FakeBackend(reply=ids, burst=burst)) as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
    chunks: list[dict[str, Any]] = [chunk["choices"][0] for chunk in events(answer.text) if chunk["choices"]]
    order, parts = list[str](), dict[str, str]()
    for chunk in chunks:
        delta = chunk["delta"]
        kinds = [key for key in ("reasoning", "content", "tool_calls") if delta.get(key)]
        assert len(kinds) < 2, delta
        order += [kind for kind in kinds if order[-1:] != [kind]]
        for kind in kinds:
            if kind != "tool_calls":
                parts[kind] = parts.get(kind, "") + delta[kind]
    assert order == ["reasoning", "content", "tool_calls", "content"]
    assert parts == {"reasoning": "Hm, so.", "content": "Let me look.\nDone."}
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    told = [token for chunk in chunks for token in chunk.get("token_ids") or ()]
    scores = [score for chunk in chunks for score in (chunk.get("logprobs") or {"content": ()})["content"]]
    assert len(scores) == len(told) and told[: len(ids)] == ids
    calls = [part["function"] for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    assert json.loads("[" + "".join(call.get("arguments", "") for call in calls).replace("}{", "},{") + "]") == [
        {"a": 1},
        {"a": 1},
    ]
