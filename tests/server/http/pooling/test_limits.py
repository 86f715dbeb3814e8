"""What one call may bring and be given, the texts at the edge of it, and that nobody else pays for what is refused."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.server.fakes import WIDTH, FakeBackend
from tests.server.http.pooling.test_embeddings import backend, embed, expected
from tests.server.http.serving import client


async def status(fake: FakeBackend, path: str, body: dict[str, Any], **settings: Any) -> tuple[int, dict[str, Any]]:
    async with client(fake, **settings) as http:
        answer = await http.post(path, json=body)
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("limit", "path", "body", "says"),
    [
        ({"max_queued_tokens": 30}, "/v2/embed", {"texts": ["a b c d e f g h"] * 9}, "prompt tokens"),
        ({"max_queued_tokens": 30}, "/rerank", {"query": "a b c", "documents": ["d e f g"] * 9}, "prompt tokens"),
        ({"max_queued_logprobs": 30}, "/pooling", {"input": ["a b c d e"] * 9, "task": "token_embed"}, "16 of these"),
        ({"max_inputs": 2}, "/v2/embed", {"texts": ["a"] * 3}, "holds 3 texts"),
        ({"max_inputs": 2}, "/rerank", {"query": "a", "documents": ["a"] * 3}, "documents holds 3 texts"),
        ({"max_inputs": 2}, "/score", {"data_1": ["a"] * 3, "data_2": ["b"] * 3}, "data_2 holds 3 texts"),
    ],
)  # fmt: skip
async def test_the_sum_of_a_call_is_bounded(limit: dict[str, int], path: str, body: dict[str, Any], says: str) -> None:
    fake = backend()
    code, said = await status(fake, path, body, **limit)
    assert code == 400 and says in said["error"]["message"] and not fake.submitted
    assert (await status(fake, "/v1/embeddings", {"input": "a"}, **limit))[0] == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_an_empty_text_is_what_the_tokenizer_makes_of_it(path: str) -> None:
    """Special tokens alone are a text; nothing at all is none."""
    fake = backend()
    code, answer = await status(fake, path, {"input": ["", "a"]})
    assert fake.tokenizer is not None and code == 200 and len(answer["data"]) == 2
    assert fake.submitted[0].prompt.token_ids == fake.tokenizer.encode("") != []
    for nothing in ("", ["a", ""]):
        code, said = await status(fake, path, {"input": nothing, "add_special_tokens": False})
        assert code == 400 and "is empty: it has no tokens" in said["error"]["message"]


async def test_special_tokens_alone_are_a_text() -> None:
    fake = backend()
    assert fake.tokenizer is not None
    ids = fake.tokenizer.encode("")
    assert (await embed(fake, input=ids))["data"][0]["embedding"] == expected(fake, "").tolist()
    assert (await embed(fake, input=[ids, ids]))["usage"]["prompt_tokens"] == 2 * len(ids)


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/embeddings", {"input": "word " * 80, "truncate_prompt_tokens": 9}, 9),
        ("/pooling", {"input": "word " * 80, "truncate_prompt_tokens": -1, "task": "token_embed"}, 64),
        ("/v2/embed", {"texts": ["word " * 80]}, 64),
        ("/v2/embed", {"texts": ["word " * 80], "truncate": "START", "max_tokens": 9}, 9),
        ("/rerank", {"query": "a", "documents": ["word " * 80], "truncate_prompt_tokens": 9}, 9),
    ],
)
async def test_what_is_too_long_is_cut_where_that_is_asked_and_refused_elsewhere(
    path: str, body: dict[str, Any], kept: int
) -> None:
    fake = backend()
    assert (await status(fake, path, body))[0] == 200
    assert max(len(each.prompt.token_ids) for each in fake.submitted) == kept
    whole = {key: each for key, each in body.items() if key not in ("truncate_prompt_tokens", "truncate", "max_tokens")}
    if path == "/v2/embed":
        whole["truncate"] = "NONE"
    code, said = await status(backend(), path, whole)
    assert code == 400 and said["error"]["code"] == "context_length_exceeded"


async def test_a_bad_text_takes_none_of_another_call_along() -> None:
    fake = backend(hang=0)
    async with client(fake) as http:
        good = asyncio.create_task(http.post("/v1/embeddings", json={"input": ["a", "b"]}))
        while len(fake.submitted) < 2:
            await asyncio.sleep(0)
        bad = await http.post("/v1/embeddings", json={"input": ["a", "word " * 80, "b"]})
        fake.go_on.set()
        answer = (await good).json()
    assert bad.status_code == 400 and "input[1]" in bad.json()["error"]["message"] and len(fake.submitted) == 2
    found = np.asarray([each["embedding"] for each in answer["data"]], np.float32)
    assert found.shape == (2, WIDTH) and np.array_equal(found[1], expected(fake, "b"))
