"""POST /v1/messages and count_tokens over a fake engine: answers, events, and what is refused."""

import json
from typing import Any

import pytest

from tests.server.http.anthropic.anthropic_requests import PATH, body, create, error_of, read_events
from tests.server.http.responses.responses_requests import SAY, backend
from tests.server.http.serving import client

START = ["message_start", "content_block_start", "ping"]
END = ["content_block_stop", "message_delta", "message_stop"]


async def test_an_answer_counts_what_was_cached_beside_the_input() -> None:
    fake = backend(cached=3)
    answer = await create(fake, system="Be kind.")
    prompt = len(fake.submitted[0].prompt.token_ids)
    assert answer["content"] == [{"type": "text", "text": SAY}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 3, 3)
    assert usage["output_tokens"] == len(fake.reply or ()) + 1  # and end-of-text
    assert fake.submitted[0].prompt.text == "<s><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


STOPS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "end_turn", None),
    ({"max_tokens": 4}, "max_tokens", None),
    ({"stop_sequences": ["you", "never"]}, "stop_sequence", "you"),
]


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize(("fields", "reason", "sequence"), STOPS)
async def test_a_stream_is_the_answer_in_pieces(
    fields: dict[str, Any], reason: str, sequence: str | None, burst: int
) -> None:
    whole = await create(backend(cached=2), **fields)
    made = await create(backend(cached=2, burst=burst), **fields, stream=True)
    deltas = [event["delta"]["text"] for event in made if event["type"] == "content_block_delta"]
    assert [event["type"] for event in made] == [*START, *["content_block_delta"] * len(deltas), *END]
    start, end = made[0]["message"], made[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert "".join(deltas) == whole["content"][0]["text"]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert end["usage"] == whole["usage"] and start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


async def test_the_end_of_the_context_is_told_from_max_tokens() -> None:
    fake = backend(max_model_len=64)
    fake.reply = [853] * 1000
    answer = await create(fake, max_tokens=1000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == 64


async def test_an_empty_answer_has_no_block() -> None:
    fake = backend()
    fake.reply = []
    assert (await create(fake))["content"] == []
    made = await create(fake, stream=True)
    assert [event["type"] for event in made] == ["message_start", *END[1:]]


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    fake = backend()
    messages = [{"role": "user", "content": "Name?"}, {"role": "assistant", "content": "My name is"}]
    answer = await create(fake, messages=messages)
    assert fake.submitted[0].prompt.text == "<s><|user|>Name?<|end|><|assistant|>My name is"
    assert answer["content"][0]["text"].strip() == SAY
    await create(fake, messages=[messages[0], {"role": "assistant", "content": ""}])
    assert fake.submitted[1].prompt.text == "<s><|user|>Name?<|end|><|assistant|>"


async def test_blocks_and_neighbours_of_one_role_are_one_message() -> None:
    fake = backend()
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await create(
        fake,
        system=[{"type": "text", "text": "Be kind.", **cached}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "A", **cached}, {"type": "text", "text": "B"}]},
            {"role": "user", "content": "C"},
            {"role": "assistant", "content": "D"},
            {"role": "user", "content": "E"},
        ],
    )
    text = fake.submitted[0].prompt.text
    assert text == "<s><|system|>Be kind.<|end|><|user|>ABC<|end|><|assistant|>D<|end|><|user|>E<|end|><|assistant|>"


async def test_counting_is_what_asking_would_count() -> None:
    fake = backend()
    asked = body([{"type": "text", "text": "Hi there"}], system="Be kind.")
    async with client(fake, strict_requests=True) as http:
        await http.post(PATH, json=asked)
        del asked["max_tokens"]
        answer = await http.post(PATH + "/count_tokens", json=asked)
        assert answer.json() == {"input_tokens": len(fake.submitted[0].prompt.token_ids)}
        long = await http.post(PATH + "/count_tokens", json={"messages": [{"role": "user", "content": "a " * 5000}]})
        assert long.json()["input_tokens"] > fake.max_model_len
        told = error_of(await http.post(PATH + "/count_tokens", json={**asked, "max_tokens": 5}), 400)
        assert "max_tokens" in told[1]
    assert len(fake.submitted) == 1


async def test_a_failure_on_the_way_is_an_event() -> None:
    async with client(backend(fail_at=2)) as http:
        made = read_events((await http.post(PATH, json=body(stream=True))).text)
    assert [event["type"] for event in made[-2:]] == ["content_block_delta", "error"]
    assert made[-1]["error"]["type"] == "api_error" and "the fake failed" in made[-1]["error"]["message"]


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    async with client(backend(fail_at=0)) as http:
        for stream in (False, True):
            answer = await http.post(PATH, json=body(stream=stream))
            assert error_of(answer, 500)[0] == "api_error" and answer.headers["request-id"]


async def test_statuses_have_anthropics_types() -> None:
    async with client(backend(dead="it has ended")) as http:
        assert error_of(await http.post(PATH, json=body()), 503) == ("overloaded_error", "it has ended; try again")
    async with client(backend(), api_key=("key",)) as http:
        assert error_of(await http.post(PATH, json=body()), 401)[0] == "authentication_error"
        headers = {"x-api-key": "key", "anthropic-version": "2099-01-01", "anthropic-beta": "any"}
        assert (await http.post(PATH + "?beta=true", json=body(), headers=headers)).status_code == 200
        assert error_of(await http.get(PATH, headers=headers), 405)[0] == "invalid_request_error"
    async with client(backend()) as http:
        kind, message = error_of(await http.post(PATH, json=body(model="other")), 404)
        assert kind == "not_found_error" and "other" in message
        kind, message = error_of(await http.post(PATH, json=body("a " * 5000)), 400)
        assert kind == "invalid_request_error" and message.endswith("; shorten it")


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens must be from 1"),
    ({"max_token": 5}, "did you mean 'max_tokens'?"),
    ({"messages": None}, "messages must be a list"),
    ({"messages": []}, "an empty list"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"role": "usr", "content": "Hi"}]}, "did you mean 'user'?"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content must not be empty"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be text"),
    ({"messages": [{"role": "user", "content": "Hi", "name": "me"}]}, "'name'"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]}, "white space"),
    (user({"type": "image", "source": {"type": "url", "url": "https://x"}}), "text alone"),
    (user({"type": "image", "source": {}}), "source.type must be text"),
    (user({"type": "image", "source": {"type": "file", "file_id": "f"}}), "none are kept here"),
    (user({"type": "document", "source": {}}), "files are not read"),
    (user({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "of the user has no blocks of type tool_use"),
    (user({"type": "tool_result", "content": "a"}), "tool_use_id must be text"),
    (user({"type": "thinking", "thinking": "a"}), "thinking"),
    (user({"type": "redacted_thinking", "data": "a"}), "of the user has no blocks of type redacted"),
    (user({"type": "txt", "text": "a"}), "did you mean 'text'?"),
    (user({"type": "text", "text": ""}), "must not be empty"),
    (user({"type": "text"}), "messages[0].content[0].text must be text, not null"),
    (user({"type": "text", "text": "a", "cache_control": {"type": "forever"}}), "known: ephemeral"),
    (user({"type": "text", "text": "a", "citations": [{}]}), "no documents"),
    (user("Hi"), "an object"),
    ({"system": 5}, "system must be text"),
    ({"system": [{"type": "image"}]}, "source must be an object"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"thinking": {"type": "off"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema must be a JSON schema"),
    ({"output_format": {"type": "yaml"}}, "output_format.type"),
    ({"container": "c"}, "no code"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p must be"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "you"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences may hold 64"),
    ({"stop": ["you"]}, "stop_sequences"),
    ({"metadata": {"user": "me"}}, "user"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"stream": "yes"}, "stream"),
    ({"cache_control": "on"}, "cache_control must be an object"),
    ({"system": "\ud800"}, "JSON"),
]


@pytest.mark.parametrize(("fields", "word"), BAD)
async def test_what_is_wrong_or_not_served_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    fake = backend()
    async with client(fake, strict_requests=True) as http:
        raw = json.dumps({**body(), **fields})
        answer = await http.post(PATH, content=raw, headers={"content-type": "application/json"})
    kind, message = error_of(answer, 400)
    assert kind == "invalid_request_error" and word in message, message
    assert answer.headers["request-id"] and not fake.submitted


HARMLESS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}},
    {"metadata": {"user_id": "me"}, "service_tier": "standard_only", "cache_control": {"type": "ephemeral"}},
    {"container": None, "mcp_servers": [], "output_config": {}, "speed": "standard"},
    {"temperature": 0, "top_p": 0.5, "top_k": 0, "seed": 7, "cache_salt": "tenant", "priority": 2},
]


@pytest.mark.parametrize("fields", HARMLESS)
async def test_what_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert await create(**fields)


async def test_sampling_reaches_the_engine() -> None:
    fake = backend()
    await create(fake, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], seed=3, cache_salt="tenant")
    [asked] = fake.submitted
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.seed) == (0.5, 0.9, 7, ["x"], 3)
    assert params.max_tokens == 100 and asked.prompt.cache_salt == "tenant"
