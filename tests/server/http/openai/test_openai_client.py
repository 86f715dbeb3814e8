"""The client that people have: openai's own package, synchronous and not, against a server that listens."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import Live, serving

SAY = "Nice to meet you 👋🏽"
ASK: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    fake = FakeBackend(cached=2)
    fake.reply = fake.encode(SAY)
    with serving(fake, api_key=("secret",)) as server:
        yield server


@pytest.fixture
def ai(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_a_chat(ai: openai.OpenAI) -> None:
    answer = ai.chat.completions.create(model=MODEL, messages=ASK, n=2, logprobs=True, top_logprobs=3, seed=1)
    assert [choice.message.content for choice in answer.choices] == [SAY, SAY]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id is not None


def test_a_streamed_chat(ai: openai.OpenAI) -> None:
    chunks = list(
        ai.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens > 0


def test_the_clients_own_reader_of_streams(ai: openai.OpenAI) -> None:
    """It joins the chunks and checks them against the types."""
    with ai.chat.completions.stream(model=MODEL, messages=ASK, logprobs=True, top_logprobs=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == SAY


def test_a_completion(ai: openai.OpenAI) -> None:
    answer = ai.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, logprobs=1, echo=True, max_tokens=30, extra_body={"top_k": 3}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == "a" + SAY and answer.choices[3].text == "b" + SAY
    stream = ai.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=30)
    assert "".join(chunk.choices[0].text for chunk in stream) == SAY


def test_models(ai: openai.OpenAI) -> None:
    assert [each.id for each in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).owned_by == "quintet"


def test_errors_are_the_clients_own(live: Live, ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ai.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        ai.completions.create(model=MODEL, prompt="word " * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="gpt-4", messages=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError), openai.OpenAI(base_url=f"{live.url}/v1", api_key="no") as other:
        other.models.list()


async def test_the_asynchronous_client(live: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0) as ai:

        async def one() -> str:
            stream = await ai.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(16))) == [SAY] * 16


def test_a_stream_that_fails_raises() -> None:
    with serving(FakeBackend(fail_at=1)) as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="-") as ai:
        stream = ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi Hi"}], stream=True)
        with pytest.raises(openai.APIError, match="the fake failed"):
            list(stream)


def test_the_client_comes_again_when_the_server_is_busy() -> None:
    fake = FakeBackend(hang=1)
    with serving(fake, max_queued_requests=1) as live:
        wire = live.begin("/v1/completions", {"prompt": "x", "max_tokens": 5})
        live.run(_running(fake))
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as ai:
            with pytest.raises(openai.RateLimitError) as busy:
                ai.completions.create(model=MODEL, prompt="x")
            assert busy.value.code == "server_overloaded"
        hooks: dict[str, list[object]] = {"response": [lambda response: live.go_on()]}
        http = httpx.Client(event_hooks=hooks)  # type: ignore[arg-type]
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=60, http_client=http) as ai:
            assert ai.completions.create(model=MODEL, prompt="x", max_tokens=2).choices[0].text
        wire.close()


async def _running(fake: FakeBackend) -> None:
    while not fake.running:
        await asyncio.sleep(0.01)
