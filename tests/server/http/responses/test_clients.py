"""OpenAI's own clients, sync and async, against the server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseTextDeltaEvent

from tests.server.fakes import MODEL
from tests.server.http.responses.responses_requests import SAY, backend
from tests.server.http.serving import Live, serving


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(backend(cached=2), api_key=("key",)) as made:
        yield made


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=live.url + "/v1", api_key="key", max_retries=0, _strict_response_validation=True
    ) as made:
        yield made


def test_a_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert first.output_text == SAY and first.status == "completed" and first.metadata == {"a": "b"}
    assert first.usage is not None and first.usage.input_tokens_details.cached_tokens == 2
    second = client.responses.create(model=MODEL, input="More", previous_response_id=first.id, max_output_tokens=3)
    assert second.status == "incomplete" and second.incomplete_details is not None
    assert second.incomplete_details.reason == "max_output_tokens"
    again = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}]
    )
    assert again.output_text == SAY
    assert client.responses.retrieve(first.id) == first
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.responses.retrieve(first.id)


def test_streams(client: openai.OpenAI) -> None:
    with client.responses.create(model=MODEL, input="Hi", stream=True) as events:
        made = list(events)
    assert "".join(each.delta for each in made if isinstance(each, ResponseTextDeltaEvent)) == SAY
    assert isinstance(made[-1], ResponseCompletedEvent) and made[-1].response.output_text == SAY
    with client.responses.stream(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    ) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == SAY
    part: Any = final.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2


def test_the_background(live: Live, client: openai.OpenAI) -> None:
    live.backend.hang = 3
    begun = client.responses.create(model=MODEL, input="Hi", background=True)
    assert begun.status == "queued"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled" and live.backend.aborted
    events = client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
    first = [next(events) for _ in range(6)]  # up to a delta
    events.close()
    live.go_on()
    response_id = first[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=5))
    text = "".join(each.delta for each in [*first, *rest] if isinstance(each, ResponseTextDeltaEvent))
    assert text == SAY and rest[-1].type == "response.completed"
    with client.responses.stream(response_id=response_id, starting_after=5) as stream:
        assert stream.get_final_response().output_text == SAY
    assert client.responses.retrieve(response_id).output_text == SAY


async def test_the_async_client(live: Live) -> None:
    async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="key", max_retries=0) as client:
        answer = await client.responses.create(model=MODEL, input="Hi")
        assert answer.output_text == SAY
        async with client.responses.stream(model=MODEL, input="Hi", previous_response_id=answer.id) as stream:
            kinds = [event.type async for event in stream]
            assert (await stream.get_final_response()).output_text == SAY
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        begun = await client.responses.create(model=MODEL, input="Hi", background=True, stream=True)
        assert [event.type async for event in begun][-1] == "response.completed"


def test_errors(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing. is not here") as missing:
        client.responses.create(model="nothing", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="run it yourself") as refused:
        tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
        client.responses.create(model=MODEL, input="Hi", tools=[tool], tool_choice={"type": "web_search_preview"})
    assert refused.value.param == "tool_choice.type"
    with pytest.raises(openai.NotFoundError, match="API process w1"):
        client.responses.retrieve("resp_w1_" + "0" * 48)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(model=MODEL, input="Hi")
    live.backend.dead = "the engine has ended"
    with pytest.raises(openai.InternalServerError, match="the engine has ended"):
        client.responses.create(model=MODEL, input="Hi")
