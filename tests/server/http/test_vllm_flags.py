"""Flags of vLLM's server: what they change in answers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET

from quintet.outputs import RequestMetrics, RequestOutput
from quintet.server.config import ServerConfig
from quintet.server.http.errors import ClientGone
from quintet.server.http.sse import COMMENT, EventStream, with_comments
from quintet.server.http.usage import request_times
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import chat, client, events

PATHS = (("/v1/completions", {"prompt": "Hello there"}), ("/v1/chat/completions", chat("Hello there")))
EFFORT = "{{ messages[0].content }} {{ reasoning_effort }}"
SWITCHED = EFFORT + " {{ enable_thinking }}"


async def ask(path: str, body: dict[str, Any], backend: FakeBackend | None = None, **settings: Any) -> Any:
    async with client(backend, **settings) as http:
        answered = await http.post(path, json={"max_tokens": 3, **body})
    assert answered.status_code == 200, answered.text
    return events(answered.text) if body.get("stream") else answered.json()


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_every_stream_ends_with_its_usage(path: str, body: dict[str, Any]) -> None:
    streamed = {**body, "stream": True}
    assert all(each.get("usage") is None for each in await ask(path, streamed))
    *chunks, last = await ask(path, streamed, enable_force_include_usage=True)
    assert last["usage"]["completion_tokens"] == 3 and not last["choices"]
    assert all(each["usage"] is None for each in chunks)
    usual = {**streamed, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert all(each["usage"] for each in await ask(path, usual, enable_force_include_usage=True))


async def test_tokens_are_named_by_id_unless_the_request_says_otherwise() -> None:
    for path, body, fields in ((*PATHS[0], {"logprobs": 0}), (*PATHS[1], {"logprobs": True})):
        for own, wanted in ((None, True), (False, False), (True, True)):
            asked = {**body, **fields, "return_tokens_as_token_ids": own}
            answer = await ask(path, asked, return_tokens_as_token_ids=True)
            assert ("token_id:" in str(answer["choices"][0]["logprobs"])) == wanted


async def test_the_fingerprint_is_what_the_operator_wants() -> None:
    path, body = PATHS[0]
    full = (await ask(path, body))["system_fingerprint"]
    assert full.startswith("fp_") and (await ask(path, body, fingerprint_mode="hash"))["system_fingerprint"] == full
    custom = await ask(path, body, fingerprint_mode="custom", fingerprint_value="mine")
    assert custom["system_fingerprint"] == "mine"
    assert (await ask(path, body, fingerprint_mode="none"))["system_fingerprint"] is None
    for wrong in ({"fingerprint_mode": "custom"}, {"fingerprint_value": "x"}):
        with pytest.raises(ValueError, match="fingerprint_value belongs to fingerprint_mode custom"):
            ServerConfig(**wrong)


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_times_are_in_answers_if_they_are_asked_for(path: str, body: dict[str, Any]) -> None:
    assert "metrics" not in await ask(path, body)
    times = (await ask(path, body, enable_per_request_metrics=True))["metrics"]
    assert set(times) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
    } and times["generation_time_ms"] >= 0  # fmt: skip
    several = (await ask(path, {**body, "n": 2}, enable_per_request_metrics=True))["metrics"]
    assert set(several.values()) == {None}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = await ask(path, streamed, enable_per_request_metrics=True)
    assert last["metrics"]["mean_itl_ms"] >= 0


def test_times_are_those_of_the_events() -> None:
    metrics = RequestMetrics(1.0, 1.5, 2.0, 6.0, 6.0, num_generation_tokens=9)
    output = RequestOutput("a", None, [1], None, [], True, metrics=metrics)
    times: Any = request_times(ServerConfig(enable_per_request_metrics=True), [output], 1)
    assert (times.queue_time_ms, times.time_to_first_token_ms, times.generation_time_ms) == (500, 500, 4000)
    assert (times.mean_itl_ms, times.tokens_per_second) == (500, 2)
    assert request_times(ServerConfig(), [output], 1) is UNSET


async def test_comments_fill_a_silence_and_no_event_is_lost() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.1)
        yield b"b"

    found = [each async for each in with_comments(slow(), 0.02)]
    assert found[0] == b"a" and found[-1] == b"b" and set(found[1:-1]) == {COMMENT}


@pytest.mark.parametrize("keep_alive", [0, 0.01])
async def test_a_stream_that_is_left_ends_before_its_call(keep_alive: float) -> None:
    order, sent = [], 0

    async def slow() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            if keep_alive:
                await asyncio.sleep(60)
            yield b"b"
        finally:
            await asyncio.sleep(0)
            order.append("events")

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1
        if sent == 3:
            raise ClientGone

    call: Any = SimpleNamespace(close=lambda: order.append("call"))
    await EventStream(call, slow(), keep_alive=keep_alive)({}, None, send)  # type: ignore[arg-type]
    assert order == ["events", "call"]


async def test_a_stream_that_waits_has_comments() -> None:
    backend = FakeBackend(hang=1)
    async with client(backend, sse_keep_alive_interval=0.01) as http:
        asked = asyncio.ensure_future(http.post("/v1/completions", json={**PATHS[0][1], "stream": True}))
        await asyncio.sleep(0.1)
        backend.go_on.set()
        text = (await asked).text
    assert ": keep-alive\n\n" in text and events(text.replace(": keep-alive\n\n", ""))


async def test_an_error_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    for wanted in (False, True):
        caplog.clear()
        async with client(log_error_stack=wanted) as http:
            assert (await http.post("/v1/completions", json={"prompt": "x", "temperature": -1})).status_code == 400
        logged = [each for each in caplog.records if each.levelno == logging.ERROR and each.exc_info]
        assert bool(logged) == wanted


async def effort_of(path: str, fields: dict[str, Any], template: str = EFFORT, **settings: Any) -> str:
    """Returns the text of the prompt that a template makes."""
    backend = FakeBackend()
    async with client(backend, chat_template=template, **settings) as http:
        rendered = await http.post(f"{path}/render", json=fields)
    assert rendered.status_code == 200, rendered.text
    assert backend.tokenizer is not None
    return backend.tokenizer.decode(rendered.json()["token_ids"])


async def test_efforts_are_mapped_for_the_template() -> None:
    mapped = {"reasoning_effort_map": {"xhigh": "max"}}
    for effort, wanted in (("xhigh", "max"), ("low", "low")):
        path = "/v1/chat/completions"
        assert (await effort_of(path, chat("Hi", reasoning_effort=effort), **mapped)).split() == ["Hi", wanted]
        response = {"input": "Hi", "model": MODEL, "reasoning": {"effort": effort}}
        assert (await effort_of("/v1/responses", response, **mapped)).split() == ["Hi", wanted]
    for wrong in ({"some": "max"}, {"low": 3}, [1]):
        with pytest.raises(ValueError, match="reasoning_effort_map"):
            ServerConfig(reasoning_effort_map=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "mode", "wanted"),
    [
        (EFFORT, "auto", ["Hi", "low"]), (EFFORT, "low", ["Hi", "low"]), (EFFORT, "none", ["Hi"]),
        (SWITCHED, "auto", ["Hi", "False"]), (SWITCHED, "low", ["Hi", "low"]), (SWITCHED, "none", ["Hi", "False"]),
    ],
)  # fmt: skip
async def test_disabled_thinking_of_messages(template: str, mode: str, wanted: list[str]) -> None:
    fields = {**chat("Hi"), "model": MODEL, "max_tokens": 5, "thinking": {"type": "disabled"}}
    text = await effort_of("/v1/messages", fields, template, anthropic_disabled_thinking_effort=mode)
    assert text.split() == wanted
