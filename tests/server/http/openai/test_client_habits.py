"""Fields of vLLM's own that its clients send: what each does here."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quintet.sampling_params import RepetitionDetectionParams
from tests.helpers.checkpoints import tokenizers
from tests.server.fakes import LOGPROB, FakeBackend
from tests.server.http.serving import Live, chat, client, events, serving

PATHS = ("/v1/completions", "/v1/chat/completions")
DOCUMENTS = "{% for each in documents or [] %}[{{ each.title }}: {{ each.text }}]{% endfor %}{{ messages[0].content }}"


def asking(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if path == PATHS[1] else {"prompt": "Hi", **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_gets_the_name_that_its_body_gives_it(path: str) -> None:
    prefix = {PATHS[0]: "cmpl-", PATHS[1]: "chatcmpl-"}[path]
    async with client() as http:
        for stream in (False, True):
            body = asking(path, request_id="mine.1", max_tokens=1, stream=stream)
            answer = await http.post(path, json=body)
            assert answer.headers["x-request-id"] == "mine.1"
            told = events(answer.text)[0] if stream else answer.json()
            assert told["id"] == f"{prefix}mine.1"
        header = await http.post(path, json=body, headers={"X-Request-Id": "theirs"})  # as in vLLM
        assert header.headers["x-request-id"] == "theirs"
        insane = await http.post(path, json=body, headers={"X-Request-Id": "no name"})
        assert insane.headers["x-request-id"] == "mine.1"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\r\nb: c", "é", "-x", 5])
async def test_a_name_that_is_no_name_is_refused(name: Any) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "request_id": name})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")


async def test_two_requests_of_one_name_disturb_each_other_in_nothing() -> None:
    fake = FakeBackend(hang=1)
    async with client(fake) as http:
        calls = [
            asyncio.create_task(http.post(PATHS[0], json={"prompt": text, "max_tokens": 3, "request_id": "same"}))
            for text in ("one two three", "four five six")
        ]
        while fake.hanging < 2:
            await asyncio.sleep(0)
        fake.go_on.set()
        answers = [(await each).json() for each in calls]
    assert [each["id"] for each in answers] == ["cmpl-same"] * 2
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
    assert len({each.request_id for each in fake.submitted}) == 2


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_vllm_xargs_reach_logits_processors(path: str) -> None:
    fake, given = FakeBackend(), {"a": "text", "b": 1, "c": 0.5, "d": [1, "x"]}
    body = {"input": "Hi"} if path == "/v1/responses" else asking(path)
    async with client(fake) as http:
        assert (await http.post(path, json={**body, "vllm_xargs": given})).status_code == 200
        assert (await http.post(path, json={**body, "vllm_xargs": {"b": 1}, "extra_args": {"c": 2}})).status_code == 200
    assert [each.params.extra_args for each in fake.submitted] == [given, {"b": 1, "c": 2}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_documents_reach_a_template_that_reads_them(path: str, tmp_path: Any) -> None:
    tokenizer = tokenizers.byte_level(tmp_path, template=DOCUMENTS)
    fake = FakeBackend(tokenizer=tokenizer)
    documents = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
    async with client(fake) as http:
        answer = await http.post(path, json=chat("Hi", documents=documents))
        assert answer.status_code == 200, answer.text
        ids = answer.json()["tokens"] if path == "/tokenize" else fake.submitted[0].prompt.token_ids
        assert "[A: one][B: two]Hi" in tokenizer.decode(ids)
        assert (await http.post(path, json=chat("Hi", documents=[]))).status_code == 200


async def test_repetition_detection_reaches_the_engine() -> None:
    fake, given = FakeBackend(), {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    async with client(fake) as http:
        for path in (*PATHS, "/v1/responses"):
            body = {"input": "Hi"} if path == "/v1/responses" else asking(path)
            answer = await http.post(path, json={**body, "repetition_detection": {**given, "zzzz": 1}})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-quintet-ignored-fields"] == "repetition_detection.zzzz"
    assert [each.params.repetition_detection for each in fake.submitted] == [RepetitionDetectionParams(8, 2, 3)] * 3


async def test_a_chat_reports_the_tokens_that_are_named() -> None:
    async with client() as http:
        for stream in (False, True):
            body = chat(logprobs=True, top_logprobs=5, logprob_token_ids=[300, 7], max_tokens=2, stream=stream)
            answer = await http.post("/v1/chat/completions", json={**body, "return_tokens_as_token_ids": True})
            told = [answer.json()] if not stream else events(answer.text)
            content = [each for one in told for choice in one["choices"] if choice["logprobs"]
                       for each in choice["logprobs"]["content"]]  # fmt: skip
            assert [each["logprob"] for each in content] == [LOGPROB] * 2
            for each in content:
                assert [top["token"] for top in each["top_logprobs"]] == ["token_id:300", "token_id:7"]


async def test_a_completion_reports_the_drawn_token_and_those_that_are_named() -> None:
    async with client() as http:
        body = {"prompt": [5, 6], "logprobs": 0, "logprob_token_ids": [300, 7], "max_tokens": 2, "echo": True}
        answer = await http.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})
        scores = answer.json()["choices"][0]["logprobs"]
        assert [list(each or ()) for each in scores["top_logprobs"]] == [
            [], ["token_id:6"], *(["token_id:300", "token_id:7", f"token_id:{drawn}"] for drawn in (5, 6))
        ]  # fmt: skip
        for wrong in ({"logprob_token_ids": [7]}, {**body, "max_tokens": 0}):
            refused = await http.post("/v1/completions", json={"prompt": "x", **wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_token_ids")


async def test_a_prompt_is_cut_on_the_side_that_is_asked_for() -> None:
    fake = FakeBackend()
    async with client(fake) as http:
        for side in ({}, {"truncation_side": "left"}, {"truncation_side": "right"}):
            body = {"prompt": [11, 12, 13, 14], "truncate_prompt_tokens": 2, "max_tokens": 1, **side}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert [each.prompt.token_ids for each in fake.submitted] == [[13, 14], [13, 14], [11, 12]]


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_comes_in_chunks_of_as_many_tokens_as_are_asked_for(path: str) -> None:
    async with client() as http:
        body = asking(path, max_tokens=10, stream=True, return_token_ids=True, ignore_eos=True, stream_interval=4)
        chunks = events((await http.post(path, json=body)).text)
        sizes = [len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"] if choice.get("token_ids")]
        assert sizes == [1, 4, 4, 1]
        assert (await http.post(path, json={**body, "stream_interval": 0})).status_code == 400


async def test_a_chat_shows_the_prompt_that_its_template_made() -> None:
    fake = FakeBackend()
    async with client(fake) as http:
        whole = (await http.post("/v1/chat/completions", json=chat(max_tokens=1, return_prompt_text=True))).json()
        body = chat(max_tokens=2, return_prompt_text=True, stream=True)
        chunks = events((await http.post("/v1/chat/completions", json=body)).text)
        assert "prompt_text" not in (await http.post("/v1/chat/completions", json=chat(max_tokens=1))).json()
    assert whole["prompt_text"] == fake.submitted[0].prompt.text and "Hi" in whole["prompt_text"]
    assert [chunk.get("prompt_text") for chunk in chunks[:2]] == [whole["prompt_text"], None]


@pytest.mark.parametrize("field", ["prompt_logprob_token_ids", "watermarking", "trace_decode_token_ids"])
async def test_what_vllm_has_and_is_not_here_is_refused_by_name(field: str) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", field: True})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_field")


DEFAULTS = {"detokenize": True, "early_stopping": False}  # vLLM's


@pytest.mark.parametrize(("field", "value"), DEFAULTS.items())
async def test_an_unsupported_field_is_accepted_with_vllms_default_alone(field: str, value: Any) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, field: value})
        assert answer.status_code == 200, answer.text
        refused = await http.post("/v1/completions", json={"prompt": "x", field: not value})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, field, "unsupported_field")


@pytest.fixture
def live() -> Iterator[Live]:
    with serving() as server:
        yield server


def test_the_openai_client_sends_them_as_its_extra_body(live: Live) -> None:
    extra = {
        "request_id": "of-mine", "vllm_xargs": {"a": 1}, "spaces_between_special_tokens": False, "session_id": "s",
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "logprob_token_ids": [7, 9],
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as api:
        raw = api.chat.completions.with_raw_response.create(
            model="fake/model", messages=[{"role": "user", "content": "Hi"}], logprobs=True, extra_body=extra
        )
    answer = raw.parse()
    assert answer.id == "chatcmpl-of-mine" and "x-quintet-ignored-fields" not in raw.headers
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    [params] = [each.params for each in live.backend.submitted]
    assert (params.extra_args, params.spaces_between_special_tokens) == ({"a": 1}, False)
