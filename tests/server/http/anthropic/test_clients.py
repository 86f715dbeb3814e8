"""Anthropic's own clients, sync and async, against the server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam

from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.anthropic.anthropic_requests import PATH, body
from tests.server.http.responses.responses_requests import SAY, backend
from tests.server.http.serving import Live, serving

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(backend(cached=2), api_key=("key",)) as made:
        yield made


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="key", max_retries=0, _strict_response_validation=True) as made:
        yield made


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL, max_tokens=100, messages=HI, system="Be kind.", metadata={"user_id": "me"},
        extra_body={"temperature": 0, "top_k": 5},
    )  # fmt: skip
    assert text_of(message) == SAY and message.stop_reason == "end_turn" and message.role == "assistant"
    assert message.usage.cache_read_input_tokens == 2 and message._request_id
    cut = client.messages.create(model=MODEL, max_tokens=3, messages=HI)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 3
    stopped = client.messages.create(model=MODEL, max_tokens=100, messages=HI, stop_sequences=["you"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "you")
    again = client.messages.create(
        model=MODEL, max_tokens=100, messages=[*HI, {"role": "assistant", "content": message.content}, *HI]
    )
    assert text_of(again) == SAY


def test_streams(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
        assert "".join(stream.text_stream) == SAY
        final = stream.get_final_message()
    assert text_of(final) == SAY and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(backend().reply or ()) + 1 and final.usage.cache_read_input_tokens == 2
    with client.messages.create(model=MODEL, max_tokens=3, messages=HI, stream=True) as events:
        kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]


def test_counting(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
    message = client.messages.create(model=MODEL, max_tokens=1, messages=HI, system="Be kind.")
    assert counted.input_tokens == message.usage.input_tokens + 2


async def test_the_async_client(live: Live) -> None:
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="key", max_retries=0) as client:
        assert text_of(await client.messages.create(model=MODEL, max_tokens=100, messages=HI)) == SAY
        async with client.messages.stream(model=MODEL, max_tokens=100, messages=HI) as stream:
            assert "".join([text async for text in stream.text_stream]) == SAY
        beta = await client.beta.messages.create(
            model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "Hi"}]
        )
        assert text_of(beta) == SAY
        assert (await client.messages.count_tokens(model=MODEL, messages=HI)).input_tokens > 2


def test_errors(live: Live, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nothing. is not here") as missing:
        client.messages.create(model="nothing", max_tokens=1, messages=HI)
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="must be a JSON schema"):
        client.messages.create(
            model=MODEL,
            max_tokens=1,
            messages=HI,
            tools=[{"name": "f", "input_schema": None}],  # type: ignore[typeddict-item]
        )
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=HI)
    live.backend.fail_at = 2
    with pytest.raises(anthropic.APIStatusError, match="the fake failed"):
        list(client.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=True))
    live.backend.dead = "the engine has ended"
    with pytest.raises(anthropic.InternalServerError, match="the engine has ended"):
        client.messages.create(model=MODEL, max_tokens=1, messages=HI)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_pages(stream: bool) -> None:
    with serving(backend(hang=3)) as live:
        wire = live.begin(PATH, body(stream=stream))
        live.run(_hanging(live.backend))
        got = b""
        while stream and b"content_block_delta" not in got:
            got += wire.recv(65536)
        wire.close()
        live.wait_for_abort()
        assert live.backend.aborted == [live.backend.submitted[0].request_id]


async def _hanging(fake: FakeBackend) -> None:
    while not fake.hanging:
        await asyncio.sleep(0.01)
