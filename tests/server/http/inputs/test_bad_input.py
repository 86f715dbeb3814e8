"""Whatever comes in, the answer is a 400 that says what is wrong, and never a 500."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from quintet.server.http.admin.protocol import DetokenizeRequest, TokenizeRequest
from quintet.server.http.anthropic.request import CountTokens, CreateMessage
from quintet.server.http.inputs.body import Body
from quintet.server.http.openai.chat_protocol import ChatRequest
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.server.http.responses.request import CreateResponse
from tests.helpers.checkpoints import tokenizers
from tests.server.fakes import FakeBackend
from tests.server.http.serving import chat, client

GENERATE = ("/v1/completions", "/v1/chat/completions")
PATHS = (*GENERATE, "/tokenize", "/detokenize")
BODIES = [
    b"", b"{", b"null", b"[]", b'"text"', b"1", b"true", b"{}", b'{"prompt": NaN}', b'{"temperature": Infinity}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "\xff\xfe"}', b"\xef\xbb\xbf{}", b'{"seed": 1e999}', b"{'prompt': 'x'}",
    b'{"seed": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": "x", "prompt": 5}', b"\x00" * 100,
    b'{"prompt": "x"} trailing', b'{"prompt":"x",}', b'{"\\u0000": 1}', b'{"": 1}', b'{"' + b"k" * 10**5 + b'": 1}',
]  # fmt: skip
VALUES: list[Any] = [
    "", "x", -1, 0, 10**30, -(10**30), 1.5, 1e308, True, [], [[]], [None], {}, {"a": {"b": []}}, ["x"] * 5000,
    [10**9], [-1], [True], ["\x00"], "\x00", [[1, "x"]], [1, "x"], ["x", 1], [1.0], "x" * 2000,
]  # fmt: skip
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "best_of", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "presence_penalty", "repetition_penalty", "stream",
    "stream_options", "echo", "priority", "cache_salt", "truncate_prompt_tokens", "chat_template", "tools",
    "chat_template_kwargs", "tool_choice", "add_special_tokens", "return_token_ids", "user", "metadata", "extra_args",
    "service_tier", "tokens", "response_format", "suffix", "continue_final_message", "skip_special_tokens",
)  # fmt: skip


def assert_served_or_refused(response: Any, sent: Any) -> None:
    assert response.status_code < 500, (sent, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["type"] in ("invalid_request_error", "not_found_error"), (sent, error)
        assert error["message"] and len(error["message"]) < 2500, (sent, error)


@pytest.mark.parametrize("path", PATHS)
async def test_bytes_that_are_no_request_are_refused(path: str) -> None:
    async with client() as http:
        for raw in BODIES:
            response = await http.post(path, content=raw, headers={"content-type": "application/json"})
            assert_served_or_refused(response, raw[:60])
            assert response.status_code == 400, (raw[:60], response.text)


@pytest.mark.parametrize("path", PATHS)
async def test_values_of_any_kind_in_any_field_are_no_failure(path: str) -> None:
    base = {"/detokenize": {"tokens": [1]}, "/v1/chat/completions": chat()}.get(path, {"prompt": "x"})
    async with client(FakeBackend(max_model_len=32)) as http:
        for field in FIELDS:
            for value in VALUES:
                assert_served_or_refused(await http.post(path, json={**base, field: value}), (field, str(value)[:60]))


MESSAGES: list[Any] = [
    [], [[]], [None], ["x"], [{}], {}, 5, [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": [5]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": []}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"role": "assistant", "tool_calls": 5}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    [{"role": "user", "content": "x", "color": 1}], [{"role": "user", "content": "x"}, "y"],
    [[{"role": "user", "content": "x"}]], [{"role": "user" * 1000, "content": "x"}],
    [{"role": "user", "content": None}], [{"role": "assistant", "content": None}],
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_messages_of_any_kind_are_no_failure(path: str) -> None:
    async with client() as http:
        for messages in MESSAGES:
            assert_served_or_refused(await http.post(path, json={"messages": messages}), messages)


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids", "logit_bias", "prompt"])
async def test_ids_out_of_the_vocabulary_name_their_field(field: str) -> None:
    size = FakeBackend().model_info.vocab_size
    value = {str(size): 1} if field == "logit_bias" else [size]
    async with client() as http:
        response = await http.post("/v1/completions", json={"prompt": "x", field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


async def test_a_body_that_is_no_json_is_refused_by_its_type() -> None:
    async with client() as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            response = await http.post("/v1/completions", content=b"{}", headers={"content-type": kind})
            assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]
        for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
            raw = json.dumps({"prompt": "x"}).encode()
            assert (await http.post("/v1/completions", content=raw, headers={"content-type": kind})).status_code == 200


@pytest.mark.parametrize("header", ["x-request-timeout", "content-type", "authorization", "origin", "host"])
@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"nan", b"-1", b"a" * 5000, b"[::", b"http://[", b"1e400"])
async def test_headers_of_any_kind_are_no_failure(header: str, value: bytes) -> None:
    async with client(api_key=("k",)) as http:
        given = {b"x-api-key": b"k", b"content-type": b"application/json", header.encode(): value}
        response = await http.post("/v1/completions", content=b'{"prompt": "x"}', headers=list(given.items()))
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": tokenizers.GIVES_UP}),
        ("/v1/chat/completions", chat(tokenizers.GIVES_UP)),
        ("/tokenize", {"prompt": tokenizers.GIVES_UP}),
        ("/v1/messages", {**chat(tokenizers.GIVES_UP), "model": "fake/model", "max_tokens": 1}),
    ],
)
async def test_a_panic_of_the_tokenizer_keeps_the_errors_shape(path: str, body: Any, tmp_path: Path) -> None:
    backend = FakeBackend(tokenizer=tokenizers.giving_up(tmp_path), max_model_len=2**14)
    async with client(backend) as http:
        response = await http.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert (response.status_code, response.headers["x-request-id"]) == (400, "mine"), response.text
        assert "the tokenizer cannot encode this text" in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})).status_code == 200


MANY = 20_000
BODY_MODELS = [
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, CreateResponse, CreateMessage, CountTokens,
]  # fmt: skip


@pytest.mark.parametrize("model", BODY_MODELS, ids=lambda model: model.__name__)
def test_of_very_many_wrong_values_few_are_noted(model: type[Body]) -> None:
    """pydantic makes an object for each: two million of them took seconds, and gigabytes."""
    for value in (1, "", None, 1.5, True, {}, []):
        for many in ([value] * MANY, {str(each): value for each in range(MANY)}):
            for field in model.model_fields:
                try:
                    model.model_validate({field: many})
                except ValidationError as error:
                    assert error.error_count() <= 20, (field, value)


@pytest.mark.parametrize("field", ["stream_options", "metadata"])
async def test_of_very_many_unknown_fields_the_first_are_named(field: str) -> None:
    path, body = {
        "stream_options": ("/v1/completions", {"prompt": "x", "stream": True}),
        "metadata": ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    }[field]
    async with client(strict_requests=True) as http:
        inner = {f"unknown{each}": 1 for each in range(MANY)}
        response = await http.post(path, json={**body, field: inner})
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and len(message) < 1000, message
        assert f"{field} has what it may not have: unknown field 'unknown0'" in message


def asking(path: str, **fields: Any) -> dict[str, Any]:
    base = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": chat(), "/v1/responses": {"input": "x"}}[path]
    return {**base, **fields}


@pytest.mark.parametrize("path", [*GENERATE, "/v1/responses"])
async def test_numbers_that_the_wire_cannot_carry_are_refused_by_their_field(path: str) -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        for wrong in (2**64, -(2**63) - 1, 10**30):
            for extra in ({"a": wrong}, {"a": [{"b": [1, wrong]}]}):
                response = await http.post(path, json=asking(path, extra_args=extra))
                error = response.json()["error"]
                assert (response.status_code, error["param"]) == (400, "extra_args"), error
                assert "64 bits" in error["message"]
        right = {"a": 2**64 - 1, "b": -(2**63)}
        assert (await http.post(path, json=asking(path, extra_args=right, temperature=0))).status_code == 200
    assert [each.params.extra_args for each in backend.submitted] == [right]


async def test_extra_args_are_bounded_in_bytes() -> None:
    async with client() as http:
        response = await http.post("/v1/completions", json=asking("/v1/completions", extra_args={"a": "x" * 70_000}))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "extra_args") and "65536 bytes" in error["message"]
        response = await http.post("/v1/completions", json=asking("/v1/completions", extra_args={"a": "x" * 60_000}))
        assert response.status_code == 200


async def test_numbers_that_an_answer_repeats_have_bounds() -> None:
    async with client() as http:
        for wrong in (2**64, -1):
            response = await http.post("/v1/responses", json={"input": "x", "max_tool_calls": wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tool_calls")


@pytest.mark.parametrize(
    ("banning", "blamed"),
    [
        ({"allowed_token_ids": [853], "bad_words": ["{}"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [853, 854], "stop_token_ids": [853, 854], "min_tokens": 2}, "allowed_token_ids"),
    ],
)
async def test_parameters_that_leave_no_token_are_refused(banning: dict[str, Any], blamed: str) -> None:
    backend = FakeBackend()
    tokenizer = backend.tokenizer
    assert tokenizer is not None
    word = tokenizer.token_text(853).strip()
    (single,) = {each[0] for each in tokenizer.bad_word_ids([word]) if len(each) == 1}
    given = json.loads(json.dumps(banning).replace("{}", word).replace("853", str(single)))
    async with client(backend) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", **given})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, blamed), error
        assert "leave no token to draw" in error["message"]
        free = {**given, "allowed_token_ids": [*given["allowed_token_ids"], 5]}
        assert (await http.post("/v1/completions", json={"prompt": "x", **free})).status_code == 200
    assert len(backend.submitted) == 1
