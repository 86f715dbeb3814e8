"""POST /v1/completions over a fake engine: every field that shapes the answer."""

from typing import Any

import pytest

from tests.server.fakes import LOGPROB, MODEL, FakeBackend
from tests.server.http.serving import client, events

TEXT = "The quick brown fox"


async def complete(backend: FakeBackend | None = None, **body: Any) -> Any:
    async with client(backend) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


async def refused(backend: FakeBackend | None = None, **body: Any) -> dict[str, Any]:
    async with client(backend, strict_requests=True) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_an_answer_has_openais_shape() -> None:
    backend = FakeBackend(cached=1)
    answer = await complete(backend, prompt=TEXT, max_tokens=3)
    assert answer["object"] == "text_completion" and answer["model"] == MODEL and answer["id"].startswith("cmpl-")
    ids = [0, *backend.encode(TEXT)]
    assert answer["choices"] == [
        {
            "index": 0, "text": backend.tokenizer.decode(ids[:3]), "logprobs": None, "finish_reason": "length",
            "stop_reason": None,
        }
    ]  # fmt: skip
    assert answer["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 3, "total_tokens": len(ids) + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip


async def test_sixteen_tokens_are_the_default_and_the_models_own_goes_before_it() -> None:
    assert (await complete(prompt=TEXT))["usage"]["completion_tokens"] == 16
    backend = FakeBackend().with_defaults(max_tokens=7, temperature=0.25)
    assert (await complete(backend, prompt=TEXT))["usage"]["completion_tokens"] == 7
    assert backend.submitted[0].params.temperature == 0.25
    await complete(backend, prompt=TEXT, temperature=0.5)
    assert backend.submitted[1].params.temperature == 0.5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hello", [[0, 853]]),
        ([853, 17], [[853, 17]]),
        (["Hello", "Hello Hello"], [[0, 853], [0, 853, 37, 853]]),
        ([[853], [17, 18]], [[853], [17, 18]]),
    ],
)
async def test_a_prompt_comes_in_four_forms(prompt: Any, expected: list[list[int]]) -> None:
    backend = FakeBackend()
    answer = await complete(backend, prompt=prompt, max_tokens=2, n=2)
    got = [each.prompt.token_ids for each in backend.submitted]
    assert [ids[:2] for ids in got] == [ids[:2] for ids in expected] and len(got) == len(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))


@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["Hello", TEXT], "n": 2}, {"stop": " brown"}])
async def test_a_stream_is_the_answer_in_pieces(fields: dict[str, Any], burst: int) -> None:
    body = {"prompt": "Grüße 👋🏽 你好 " + TEXT, "max_tokens": 40, "logprobs": 1, "return_token_ids": True, **fields}
    whole = await complete(FakeBackend(burst=burst), **body)
    chunks = await complete(FakeBackend(burst=burst), **body, stream=True, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert sum((each["token_ids"] for each in mine), []) == choice["token_ids"]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert sum((each["logprobs"][key] for each in mine if each["logprobs"]), []) == choice["logprobs"][key]


async def test_multibyte_characters_come_whole() -> None:
    backend = FakeBackend()
    backend.reply = backend.encode("👋🏽🤷‍♀️é")
    chunks = await complete(backend, prompt="x", max_tokens=99, stream=True)
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "👋🏽🤷‍♀️é" and not any("\ufffd" in text for text in texts)
    assert len(backend.reply) > len([text for text in texts if text])  # some character was cut by tokens


async def test_each_step_that_gave_tokens_is_a_chunk_though_their_text_is_held_back() -> None:
    held = {"prompt": TEXT, "max_tokens": 4, "stop": f"{TEXT} and more"}
    chunks = await complete(**held, stream=True)
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert len(texts) == 4 and texts[:3] == [""] * 3  # who times tokens by chunks sees all four
    assert texts[3] == (await complete(**held))["choices"][0]["text"] != ""


async def test_streams_with_n_interleave() -> None:
    chunks = await complete(prompt=TEXT, max_tokens=4, n=2, stream=True)
    assert [choice["index"] for chunk in chunks for choice in chunk["choices"]][:4] == [0, 1, 0, 1]


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await complete(prompt=[853], max_tokens=3, stream=True, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_gives_the_prompt_first(stream: bool) -> None:
    body = {"prompt": [853, 37], "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
    answer = await complete(**body)
    [choice] = answer["choices"] if not stream else [each for chunk in answer for each in chunk["choices"]]
    text = FakeBackend().tokenizer.decode([853, 37])
    assert choice["text"] == text + "Hello"
    assert choice["logprobs"]["token_logprobs"] == [None, LOGPROB, LOGPROB]
    assert choice["logprobs"]["text_offset"] == [0, 5, len(text)]
    assert choice["logprobs"]["top_logprobs"][0] is None and len(choice["logprobs"]["top_logprobs"][1]) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_echo_without_output_gives_the_prompt_alone(stream: bool, logprobs: int | None) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": logprobs, "stream": stream, **options}
    answer = await complete(**body)
    choices = answer["choices"] if not stream else [each for chunk in answer for each in chunk["choices"]]
    usage = answer[-1]["usage"] if stream else answer["usage"]
    assert "".join(each["text"] for each in choices) == TEXT and choices[-1]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 0
    if logprobs is not None:
        assert sum(len(each["logprobs"]["tokens"]) for each in choices if each["logprobs"]) == usage["prompt_tokens"]


async def test_zero_tokens_without_echo_are_refused() -> None:
    assert (await refused(prompt=TEXT, max_tokens=0))["param"] == "max_tokens"


async def test_a_token_that_is_no_character_shows_its_bytes() -> None:
    backend = FakeBackend()
    backend.reply = backend.encode("👋🏽")
    choice = (await complete(backend, prompt="x", logprobs=0, max_tokens=99))["choices"][0]
    written = choice["logprobs"]["tokens"][:-1]  # the last is the end-of-text
    assert any(token.startswith("bytes:\\x") for token in written)
    assert choice["logprobs"]["text_offset"][-1] == len("👋🏽")


async def test_tokens_may_be_written_as_ids() -> None:
    answer = await complete(prompt=[853], max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:853"]


async def test_prompt_logprobs_come_as_in_vllm() -> None:
    answer = await complete(prompt=[853, 37], max_tokens=1, prompt_logprobs=0)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None and second["37"]["logprob"] == LOGPROB and second["37"]["rank"] == 1


async def test_a_stop_string_ends_and_is_named() -> None:
    choice = (await complete(prompt=TEXT, stop=[" brown"], max_tokens=50))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quick", "stop", " brown")
    choice = (await complete(prompt=[853, 37], stop_token_ids=[37], max_tokens=50))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 37)


async def test_sampling_fields_reach_the_engine() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "presence_penalty": 1,
        "frequency_penalty": 1, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [9],
        "bad_words": ["fox"], "allowed_token_ids": [853], "skip_special_tokens": False, "logit_bias": {"5": -1},
        "include_stop_str_in_output": True, "n": 2,
    }  # fmt: skip
    backend = FakeBackend()
    await complete(backend, prompt="x", priority=-3, cache_salt="tenant", best_of=2, **given)
    [asked] = backend.submitted
    assert {name: getattr(asked.params, name) for name in given} == {**given, "logit_bias": {5: -1.0}}
    assert asked.priority == -3 and asked.prompt.cache_salt == "tenant"


async def test_a_prompt_may_be_cut_and_goes_without_special_tokens() -> None:
    backend = FakeBackend()
    answer = await complete(backend, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, echo=True, return_token_ids=True)
    assert backend.submitted[0].prompt.token_ids == [3, 4] == answer["choices"][0]["prompt_token_ids"]
    await complete(backend, prompt=[7] * 5000, truncate_prompt_tokens=-1)
    assert len(backend.submitted[1].prompt.token_ids) == backend.max_model_len - 1
    await complete(backend, prompt="Hello", add_special_tokens=False)
    assert backend.submitted[2].prompt.token_ids == [853] and backend.submitted[2].prompt.text == "Hello"


@pytest.mark.parametrize("prompt", [[7] * 512, "word " * 600, "x" * 10**6, [[5], [7] * 512]])
async def test_a_prompt_that_is_too_long_says_so(prompt: Any) -> None:
    error = await refused(prompt=prompt)
    assert error["code"] == "context_length_exceeded" and error["param"] == "prompt"
    assert error["message"].startswith("This model's maximum context length is 512 tokens")  # clients look for it


async def test_the_longest_prompt_gets_one_token() -> None:
    answer = await complete(prompt=[7] * 511, max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 1 and answer["choices"][0]["finish_reason"] == "length"


async def test_harmless_fields_are_accepted() -> None:
    assert await complete(
        prompt="x", max_tokens=1, user="me", metadata={"a": 1}, store=False, service_tier="auto", suffix=None,
        response_format={"type": "text"}, structured_outputs=None, stream=False, use_beam_search=False, echo=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("suffix", "end", "no tokens to fill in"),
        ("store", True, "not kept"),
        ("response_format", {"type": "json_schema"}, "must be a JSON schema"),
        ("guided_json", {}, "it is called json in structured_outputs"),
        ("logits_processors", [], "--logits-processors"),
        ("length_penalty", 0.5, "belongs to beam search"),
        ("best_of", 3, "must equal n"),
        ("max_token", 3, "did you mean 'max_tokens'"),
        ("n", 17, "at most 16"),
        ("logprobs", 21, "at most 20"),
        ("stream_options", {"include_usage": True}, "set stream to true"),
        ("stream_options", {"includ_usage": True}, "includ_usage"),
        ("top_p", 0, "must be a number over 0"),
        ("prompt", ["x"] * 257, "257 prompts"),
        ("prompt", [[]], "empty"),
        ("chat_template", "x", "unknown field"),
    ],
)
async def test_what_is_not_served_is_refused_with_a_reason(field: str, value: Any, says: str) -> None:
    error = await refused(**{"prompt": "x", field: value})
    assert says in error["message"] and error["param"].split(".")[0] == field
    assert error["type"] == "invalid_request_error"


async def test_an_engine_without_a_tokenizer_takes_and_gives_ids() -> None:
    backend = FakeBackend(tokenizer=None)
    answer = await complete(backend, prompt=[3, 4], max_tokens=2, return_token_ids=True, logprobs=1, echo=True)
    assert answer["choices"][0]["token_ids"] == [3, 4]
    assert "no tokenizer" in (await refused(backend, prompt="text"))["message"]


async def test_failures_have_openais_shape() -> None:
    async with client(FakeBackend(fail_at=2)) as http:
        whole = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
        streamed = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "stream": True})
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "request_failed"
    assert events(streamed.text)[-1]["error"]["type"] == "server_error"
    async with client(FakeBackend(fail_at=0)) as http:
        early = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert early.status_code == 500
    async with client(FakeBackend(dead="the engine has ended")) as http:
        dead = await http.post("/v1/completions", json={"prompt": "x"})
    assert dead.status_code == 503 and "the engine has ended" in dead.json()["error"]["message"]
