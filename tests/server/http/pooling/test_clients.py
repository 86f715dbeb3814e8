"""What openai's and cohere's own clients do beyond the plain call: asynchronous, base64, ids, many texts, refusals."""

import asyncio
import base64
from collections.abc import Iterator

import cohere
import numpy as np
import openai
import pytest

from tests.server.fakes import MODEL, WIDTH
from tests.server.http.pooling.test_embeddings import backend, expected
from tests.server.http.serving import Live, serving


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(backend()) as server:
        yield server


@pytest.fixture
def ai(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_base64_that_is_asked_for_comes_as_it_is(live: Live, ai: openai.OpenAI) -> None:
    answer = ai.embeddings.create(model=MODEL, input="sun", encoding_format="base64")
    packed = answer.data[0].embedding
    assert isinstance(packed, str)
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), expected(live.backend, "sun"))


def test_token_ids_are_the_texts_that_they_came_of(live: Live, ai: openai.OpenAI) -> None:
    assert live.backend.tokenizer is not None
    ids = [live.backend.tokenizer.encode(text) for text in ("sun", "the moon")]
    several = ai.embeddings.create(model=MODEL, input=ids)
    alone = ai.embeddings.create(model=MODEL, input=ids[1])
    assert several.data[0].embedding == expected(live.backend, "sun").tolist()
    assert alone.data[0].embedding == several.data[1].embedding == expected(live.backend, "the moon").tolist()


def test_as_many_texts_as_openai_takes(live: Live, ai: openai.OpenAI) -> None:
    answer = ai.embeddings.create(model=MODEL, input=[f"text {at}" for at in range(2048)])
    assert [each.index for each in answer.data] == list(range(2048))
    assert answer.data[2047].embedding == expected(live.backend, "text 2047").tolist()
    with pytest.raises(openai.BadRequestError, match="holds 2049 texts, and the server takes 2048"):
        ai.embeddings.create(model=MODEL, input=["a"] * 2049)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"dimensions": 4}, "dimensions cannot be chosen"),
        ({"input": "word " * 80}, "maximum context length is 64 tokens"),
        ({"input": [9**9]}, "token id 387420489 at entry 0 is not in"),
        ({"input": []}, "input is empty"),
    ],
)
def test_refusals_reach_the_caller(ai: openai.OpenAI, asked: dict[str, object], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        ai.embeddings.create(**{"model": MODEL, "input": "sun", **asked})  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError, match="'other' is not here"):
        ai.embeddings.create(model="other", input="sun")


def test_many_callers_at_once(live: Live) -> None:
    async def ask() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
            calls = [made.embeddings.create(model=MODEL, input=f"text {at}") for at in range(20)]
            return [answer.data[0].embedding for answer in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == [expected(live.backend, f"text {at}").tolist() for at in range(20)]


def test_cohere_asynchronous_and_by_parts(live: Live) -> None:
    async def ask() -> tuple[list[int], list[float], str]:
        made = cohere.AsyncClientV2("none", base_url=live.url)
        ranked = await made.rerank(model=MODEL, query="sun", documents=["moon", "sun"])
        inputs = [{"content": [{"type": "text", "text": "sun"}]}]
        answer = await made.embed(
            model=MODEL, inputs=inputs, input_type="classification", embedding_types=["float", "base64"]
        )
        found = answer.embeddings
        assert found.float_ is not None and found.base64 is not None
        return [each.index for each in ranked.results], found.float_[0], found.base64[0]

    order, vector, packed = asyncio.run(ask())
    assert order == [1, 0] and vector == expected(live.backend, "sun").tolist()
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == vector and len(vector) == WIDTH
