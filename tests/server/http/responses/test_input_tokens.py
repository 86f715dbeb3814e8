"""POST /v1/responses/input_tokens counts what a response would read; /compact says why it is not there."""

from typing import Any

import openai
import pytest

from tests.server.fakes import MODEL
from tests.server.http.responses.responses_requests import PATH, backend, create, fail
from tests.server.http.serving import client, serving

COUNT = f"{PATH}/input_tokens"
LONG = [{"role": "user", "content": "word " * 300}, {"role": "user", "content": "word " * 50}]


async def count(http: Any, **body: Any) -> int:
    answer = await http.post(COUNT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["object"] == "response.input_tokens"
    return int(answer.json()["input_tokens"])


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi"},
        {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]},
        {"input": "Hi", "instructions": "In rhymes."},
        {"input": "Hi", "text": {"format": {"type": "text"}}, "reasoning": None, "tools": [], "tool_choice": "auto"},
    ],
)
async def test_it_counts_what_a_response_reads(body: dict[str, Any]) -> None:
    async with client(backend()) as http:
        assert await count(http, **body) == (await create(http, **body))["usage"]["input_tokens"]


async def test_a_conversation_is_counted_with_what_was_said_before() -> None:
    async with client(backend()) as http:
        first = await create(http, input="One?")
        counted = await count(http, input="Two?", previous_response_id=first["id"], model=MODEL)
        second = await create(http, input="Two?", previous_response_id=first["id"])
        assert counted == second["usage"]["input_tokens"]
        said = first["output"][0]["id"]
        alone = await count(http, previous_response_id=first["id"])
        assert first["usage"]["input_tokens"] < alone < counted
        assert await count(http, input=[{"type": "item_reference", "id": said}]) > 0


async def test_an_input_of_any_length_is_counted_and_one_that_is_cut_as_it_is_cut() -> None:
    async with client(backend(max_model_len=512)) as http:
        assert await count(http, input=LONG) > 512
        cut = await count(http, input=LONG, truncation="auto")
        read = (await create(http, input=LONG, truncation="auto"))["usage"]["input_tokens"]
        assert cut == read < 512


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "Hi", "personality": "friendly"}, "personality"),
        ({"input": "Hi", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "Hi", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "Hi", "inputs": 1}, "inputs"),
        ({"input": "Hi", "stream": True}, "stream"),
    ],
)
async def test_what_cannot_be_counted(body: dict[str, Any], param: str) -> None:
    async with client(backend(), strict_requests=True) as http:
        assert (await fail(http, "POST", COUNT, json=body))["param"] == param


async def test_the_model_must_be_served() -> None:
    async with client(backend()) as http:
        assert (await fail(http, "POST", COUNT, 404, json={"input": "Hi", "model": "other"}))[
            "code"
        ] == "model_not_found"


async def test_compacting_is_refused_by_name() -> None:
    async with client(backend()) as http:
        error = await fail(http, "POST", f"{PATH}/compact", json={"model": MODEL, "input": "Hi"})
    assert error["code"] == "unsupported" and "truncation" in error["message"]


def test_the_openai_client_counts() -> None:
    with serving(backend()) as live:
        with openai.OpenAI(
            base_url=f"{live.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai:
            counted = ai.responses.input_tokens.count(model=MODEL, input="Hi", instructions="Be kind.")
            made = ai.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
            assert made.usage is not None and counted.input_tokens == made.usage.input_tokens
            with pytest.raises(openai.BadRequestError, match="compact"):
                ai.responses.compact(model=MODEL, input="Hi")
