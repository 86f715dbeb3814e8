"""/v1/embeddings: each form of input and of output, limits, turns, and what is refused."""

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pytest

from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.pooling_params import PoolingParams
from quintet.tokenizers.tokenizer import load_tokenizer
from tests.helpers.servers.serving import until
from tests.server.fakes import BUNDLED, WIDTH, FakeBackend, fake_numbers
from tests.server.http.serving import client, serving

EMBED = PoolingParams(task="embed")


def backend(**facts: Any) -> FakeBackend:
    """An embedding model of 64 tokens."""
    bounds = {"tasks": ("embed", "token_embed"), "max_model_len": 64, "width": WIDTH, "sequence": "MEAN"}
    given = {name: facts.pop(name) for name in list(facts) if name in PoolingBounds.__dataclass_fields__}
    return FakeBackend(pooling=PoolingBounds(**{**bounds, **given}), **facts)


async def embed(fake: FakeBackend, status: int = 200, **body: Any) -> Any:
    async with client(fake) as http:
        answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def expected(fake: FakeBackend, text: str) -> Any:
    assert fake.tokenizer is not None
    return fake_numbers(fake.tokenizer.encode(text), EMBED, 0)


async def test_a_text() -> None:
    fake = backend()
    answer = await embed(fake, input="hello there", request_id="mine")
    count = len(fake.submitted[0].prompt.token_ids)
    assert (answer["id"], answer["object"], answer["model"]) == ("embd-mine", "list", "fake/model")
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    [found] = answer["data"]
    assert (found["object"], found["index"]) == ("embedding", 0)
    assert np.array_equal(np.asarray(found["embedding"], np.float32), expected(fake, "hello there"))


async def test_every_form_of_input() -> None:
    fake = backend()
    texts = ["one", "two words"]
    ids = [fake.tokenizer.encode(each) for each in texts]  # type: ignore[union-attr]
    by_text, by_ids = await embed(fake, input=texts), await embed(fake, input=ids)
    assert by_text["data"] == by_ids["data"]
    alone = [(await embed(fake, input=each))["data"][0]["embedding"] for each in (texts[0], ids[0])]
    assert alone == [by_text["data"][0]["embedding"]] * 2
    assert [each["index"] for each in by_text["data"]] == [0, 1]


async def test_a_conversation() -> None:
    fake = backend()
    answer = await embed(fake, messages=[{"role": "user", "content": "Hi"}])
    assert len(answer["data"]) == 1 and "Hi" in str(fake.submitted[0].prompt.text)
    assert not str(fake.submitted[0].prompt.text).endswith("assistant\n")


async def test_base64_and_bytes_hold_the_same_numbers() -> None:
    fake = backend()
    texts = ["a", "some more", "the end"]
    listed = [each["embedding"] for each in (await embed(fake, input=texts))["data"]]
    packed = (await embed(fake, input=texts, encoding_format="base64", embed_dtype="float32"))["data"]
    assert [np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() for each in packed] == listed
    async with client(fake) as http:
        answer = await http.post(
            "/v1/embeddings",
            json={"input": texts, "encoding_format": "bytes", "endianness": "big", "embed_dtype": "float16"},
        )
        bare = await http.post("/v1/embeddings", json={"input": texts, "encoding_format": "bytes_only"})
    told = json.loads(answer.headers["metadata"])
    assert answer.headers["content-type"] == "application/octet-stream" and told["usage"]["prompt_tokens"] > 0
    for place, values in zip(told["data"], listed, strict=True):
        assert (place["shape"], place["endianness"], place["embed_dtype"]) == ([WIDTH], "big", "float16")
        found = np.frombuffer(answer.content[place["start"] : place["end"]], ">f2")
        assert np.array_equal(found, np.asarray(values, np.float32).astype(np.float16))
    assert "metadata" not in bare.headers
    assert np.frombuffer(bare.content, "<f4").reshape(3, WIDTH).tolist() == listed


async def test_what_the_model_does_not_allow_is_refused() -> None:
    fake = backend()
    said = (await embed(fake, 400, input="a", dimensions=4))["error"]
    assert said["param"] == "dimensions" and "matryoshka" in said["message"]
    assert len((await embed(backend(matryoshka_dims=True), input="a", dimensions=4))["data"][0]["embedding"]) == 4
    said = (await embed(fake, 400, input="a", embed_dtype="int3"))["error"]
    assert said["param"] == "embed_dtype" and "bfloat16" in said["message"]
    both = {"input": "a", "messages": [{"role": "user", "content": "b"}]}
    assert "exclude each other" in (await embed(fake, 400, **both))["error"]["message"]
    said = (await embed(fake, 400, inputs="a"))["error"]
    assert (said["param"], said["message"]) == ("input", "input is missing; give input or messages")
    assert "is empty" in (await embed(fake, 400, input=[]))["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [([9**9], "input[1]"), ("word " * 80, "input[1]"), (7, "input[1]"), ([], "input[1]"), (["x"], "input[1]")],
)
async def test_one_bad_input_is_named_and_nothing_runs(wrong: Any, name: str) -> None:
    fake = backend()
    said = (await embed(fake, 400, input=["fine", wrong, "fine too"]))["error"]
    assert name in said["message"] and said["param"] == "input" and not fake.submitted


async def test_a_text_that_is_too_long() -> None:
    fake, text = backend(), "word " * 80
    said = (await embed(fake, 400, input=text))["error"]
    assert said["code"] == "context_length_exceeded" and "truncate_prompt_tokens" in said["message"]
    whole = fake.tokenizer.encode(text)  # type: ignore[union-attr]
    assert (await embed(fake, input=text, truncate_prompt_tokens=-1))["usage"]["prompt_tokens"] == 64
    assert fake.submitted[-1].prompt.token_ids == whole[:64]
    await embed(fake, input=text, truncate_prompt_tokens=5, truncation_side="left")
    assert fake.submitted[-1].prompt.token_ids == [whole[0], *whole[-4:]]  # the tokenizer's own first token stays


async def test_a_long_text_in_pieces() -> None:
    fake = backend(chunks_long_texts=True, max_embed_len=150)
    texts = ["word " * 70, "short"]
    answer = await embed(fake, input=texts)
    assert fake.tokenizer is not None
    ids = fake.tokenizer.encode(texts[0])
    pieces = [ids[at : at + 64] for at in range(0, len(ids), 64)]
    assert [each.prompt.token_ids for each in fake.submitted[:-1]] == pieces and len(pieces) == 3
    wanted = sum(fake_numbers(each, EMBED, 0).astype(np.float64) * len(each) for each in pieces) / len(ids)
    np.testing.assert_allclose(answer["data"][0]["embedding"], wanted, atol=1e-7)
    assert np.array_equal(np.asarray(answer["data"][1]["embedding"], np.float32), expected(fake, "short"))
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(fake.submitted[-1].prompt.token_ids)
    said = (await embed(fake, 400, input=["a", "word " * 90]))["error"]
    assert said["code"] == "context_length_exceeded" and "embedded in pieces" in said["message"]


async def test_how_many_texts_one_request_may_have() -> None:
    async with client(backend(), max_inputs=3) as http:
        answer = await http.post("/v1/embeddings", json={"input": ["a"] * 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "input holds 4 texts, and the server takes 3; send several requests"


async def test_tokens_of_one_request_are_bounded() -> None:
    async with client(backend(), max_queued_tokens=10) as http:
        answer = await http.post("/v1/embeddings", json={"input": ["many words are here"] * 9})
    assert answer.status_code == 400 and "prompt tokens" in answer.json()["error"]["message"]


async def test_a_large_call_comes_in_turns_and_a_small_one_between() -> None:
    """Of 2,048 texts a part is in the engine when another caller's text comes: it is not behind them all."""
    fake = backend(hang=0)
    async with client(fake) as http:
        large = asyncio.create_task(http.post("/v1/embeddings", json={"input": [f"text {n}" for n in range(2048)]}))
        while not fake.submitted:
            await asyncio.sleep(0)
        first = len(fake.submitted)
        small = asyncio.create_task(http.post("/v1/embeddings", json={"input": "small"}))
        while len(fake.submitted) == first:
            await asyncio.sleep(0)
        assert first <= 256 and fake.submitted[first].prompt.text == "small"
        fake.go_on.set()
        answers = [(await each).json()["data"] for each in (small, large)]
    assert [len(each) for each in answers] == [1, 2048]
    assert [each["index"] for each in answers[1]] == list(range(2048))
    last = answers[1][2047]["embedding"]
    assert np.array_equal(np.asarray(last, np.float32), expected(fake, "text 2047"))


async def test_a_call_never_has_more_texts_in_the_engine_than_a_turn() -> None:
    fake, most = backend(), 0
    submit = fake.submit

    def counted(*given: Any, **more: Any) -> None:
        nonlocal most
        submit(*given, **more)
        most = max(most, len(fake.running))

    fake.submit = counted  # type: ignore[method-assign]
    async with client(fake) as http:
        answer = await http.post("/v1/embeddings", json={"input": [f"text {n}" for n in range(2048)]})
    assert len(answer.json()["data"]) == 2048
    assert 128 < most <= 256


async def test_long_texts_come_by_their_tokens() -> None:
    fake = backend(hang=0, step_tokens=64)
    async with client(fake) as http:
        call = asyncio.create_task(http.post("/v1/embeddings", json={"input": [[5] * 60] * 9}))
        while not fake.submitted:
            await asyncio.sleep(0)
        assert len(fake.submitted) == 2  # of 60 tokens each: two steps
        fake.go_on.set()
        assert len((await call).json()["data"]) == 9


async def test_a_failure_ends_all() -> None:
    fake = backend(fail_at=0)
    said = (await embed(fake, 500, input=["a"] * 1000))["error"]
    assert said["code"] == "request_failed" and not fake.running and len(fake.submitted) <= 256


async def test_an_engine_that_dies_between_two_turns_is_told() -> None:
    fake = backend(hang=0)
    async with client(fake) as http:
        call = asyncio.create_task(http.post("/v1/embeddings", json={"input": ["a"] * 1000}))
        while not fake.submitted:
            await asyncio.sleep(0)
        fake.dead = "the engine has ended"
        fake.go_on.set()
        answer = await call
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"


async def test_the_models_prompt_and_case() -> None:
    fake = backend(prompts={"query": "query: "}, default_prompt="query", lowercase=True)
    fake.tokenizer = load_tokenizer(BUNDLED)
    fake.tokenizer.for_pooling(lowercase=True)
    await embed(fake, input="Hello")
    assert fake.submitted[0].prompt.token_ids == load_tokenizer(BUNDLED).encode("query: hello")


async def test_a_model_that_generates_says_what_to_do() -> None:
    said = (await embed(FakeBackend(), 400, input="a"))["error"]
    assert said["code"] == "unsupported" and "generates text and gives no numbers" in said["message"]
    assert "`quintet serve bundled-embed`" in said["message"] and "--runner pooling" in said["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "model": "fake/model"}),
    ],
)
async def test_a_model_of_numbers_generates_nothing(path: str, body: Any) -> None:
    fake = backend()
    async with client(fake) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400 and not fake.submitted
    assert "gives numbers (embed, token_embed) and generates no text" in answer.json()["error"]["message"]


async def test_a_classifier_gives_no_embeddings() -> None:
    said = (await embed(backend(tasks=("classify",)), 400, input="a"))["error"]
    assert "has classify; ask /classify" in said["message"]


def test_who_hangs_up_ends_the_rest() -> None:
    fake = backend(hang=0)
    with serving(fake) as live:
        wire = live.begin("/v1/embeddings", {"input": ["a"] * 1000})
        assert until(lambda: bool(fake.submitted))
        wire.close()
        live.wait_for_abort()
        assert until(lambda: not live.service.calls)
        assert len(fake.aborted) == len(fake.submitted) <= 256 and not fake.running
