"""POST /inference/v1/generate over a fake engine: what it takes, what it answers, and what it refuses."""

from typing import Any

import pytest

from tests.server.fakes import LOGPROB, MODEL, FakeBackend
from tests.server.http.serving import client, events

PATH = "/inference/v1/generate"
IDS = [5, 6, 7]


async def generate(backend: FakeBackend | None = None, params: dict[str, Any] | None = None, **body: Any) -> Any:
    async with client(backend) as http:
        response = await http.post(PATH, json={"token_ids": IDS, "sampling_params": params or {}, **body})
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


async def refused(params: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
    async with client(strict_requests=True) as http:
        response = await http.post(PATH, json={"token_ids": IDS, "sampling_params": params or {}, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_an_answer_has_vllms_shape() -> None:
    answer = await generate(FakeBackend(cached=1), {"max_tokens": 2, "logprobs": 1}, request_id="mine")
    assert answer["request_id"] == "mine" and answer["model"] == MODEL and answer["output_mode"] == "tokens"
    (choice,) = answer["choices"]
    assert choice["token_ids"] == IDS[:2] and choice["finish_reason"] == "length" and "text" not in choice
    first = choice["logprobs"]["content"][0]
    assert first["token_id"] == IDS[0] and first["token"] == f"token_id:{IDS[0]}" and first["logprob"] == LOGPROB
    assert first["top_logprobs"][0]["token_id"] == IDS[0]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 2
    assert answer["prompt_logprobs"] is None and answer["prompt_token_ids"] is None
    assert choice["routed_experts"] is None and answer["prompt_token_id_logprobs"] is None


async def test_parameters_have_vllms_defaults_and_not_the_models() -> None:
    backend = FakeBackend().with_defaults(temperature=0.25, top_k=7)
    await generate(backend, {"top_p": 0.5}, priority=3, cache_salt="salt")
    (asked,) = backend.submitted
    assert (asked.params.temperature, asked.params.top_k, asked.params.top_p) == (1.0, 0, 0.5)
    assert asked.params.max_tokens is None and not asked.params.detokenize
    assert asked.priority == 3 and asked.prompt.cache_salt == "salt" and asked.prompt.token_ids == IDS


async def test_text_is_given_if_it_is_asked_for() -> None:
    backend = FakeBackend()
    answer = await generate(backend, {"max_tokens": 2, "logprobs": 0}, output_mode="text", return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["text"] == backend.tokenizer.decode(IDS[:2]) and answer["prompt_token_ids"] == IDS
    first = choice["logprobs"]["content"][0]
    assert first["logprob"] == LOGPROB and bytes(first["bytes"]).decode() == first["token"]


async def test_a_stream_gives_each_token_once() -> None:
    parts = await generate(
        params={"max_tokens": 3, "logprobs": 0}, stream=True, stream_options={"include_usage": True},
        return_token_ids=True,
    )  # fmt: skip
    tokens = [token for part in parts for choice in part["choices"] for token in choice["token_ids"]]
    assert tokens == IDS and parts[-1]["usage"]["completion_tokens"] == 3
    assert [part["prompt_token_ids"] for part in parts] == [IDS] + [None] * (len(parts) - 1)
    assert all(each["logprobs"]["content"] for part in parts[:-1] for each in part["choices"])


async def test_parameters_that_ask_for_nothing_may_be_there() -> None:
    await generate(params={"output_kind": 2, "detokenize": True, "skip_clone": False, "stop": None})


@pytest.mark.parametrize(
    ("params", "body", "param", "says"),
    [
        ({"temperature": -1}, {}, "sampling_params.temperature", "must be"),
        ({"skip_reading_prefix_cache": True}, {}, "sampling_params.skip_reading_prefix_cache", "cache_salt"),
        ({"temprature": 1}, {}, "sampling_params", "temperature"),
        ({"output_kind": "x"}, {}, "sampling_params.output_kind", "stream"),
        ({"prompt_logprob_token_ids": [[1]]}, {"stream": True}, "sampling_params.prompt_logprob_token_ids", "stream"),
        ({}, {"features": {"mm_hashes": {}}}, "features", "/v1/chat/completions"),
        ({}, {"content_parts": [{"type": "image_url"}]}, "content_parts", "/v1/chat/completions"),
        ({}, {"token_ids": []}, "token_ids", "empty"),
        ({}, {"token_ids": [10**7]}, "token_ids", "is not in 0 .."),
        ({}, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    params: dict[str, Any], body: dict[str, Any], param: str, says: str
) -> None:
    error = await refused(params, **body)
    assert (error["param"] or "").startswith(param) and says in error["message"]


async def test_it_needs_the_servers_key() -> None:
    async with client(api_key=["secret"]) as http:
        assert (await http.post(PATH, json={"token_ids": IDS, "sampling_params": {}})).status_code == 401
