"""/api/generate: in the template, raw, with a suffix; /api/embed and /api/embeddings."""

from typing import Any

import numpy as np
import pytest

from quintet.tokenizers.tokenizer import Tokenizer
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.inputs.test_infill import QWEN, tokenizer
from tests.server.http.ollama.ollama_requests import SAY, ask, backend, error_of, lines
from tests.server.http.pooling.test_embeddings import backend as embedder

PATH = "/api/generate"


async def test_a_prompt_is_put_into_the_template() -> None:
    fake = backend()
    answer = (await ask(PATH, fake, prompt="Hi", system="Be kind.", stream=False)).json()
    assert answer["response"] == SAY and answer["done_reason"] == "stop" and "message" not in answer
    text = fake.submitted[0].prompt.text or ""
    assert "Be kind." in text and text.endswith("<|assistant|>")
    *parts, end = lines(await ask(PATH, fake, prompt="Hi"))
    assert "".join(part["response"] for part in parts) == SAY and end["done"] and end["response"] == ""


async def test_raw_is_the_prompt_alone() -> None:
    fake = backend()
    assert (await ask(PATH, fake, prompt="Hi", raw=True, stream=False)).json()["response"] == SAY
    assert fake.submitted[0].prompt.text == "Hi"


async def test_a_model_without_a_template_reads_the_prompt_alone() -> None:
    made = tokenizer()
    fake = FakeBackend(tokenizer=Tokenizer(made.backend, made.special_tokens, None, made._load))
    fake.reply = fake.encode(SAY)
    assert (await ask(PATH, fake, prompt="Hi", stream=False)).json()["response"] == SAY
    assert fake.submitted[0].prompt.text == "Hi"


async def test_a_suffix_is_filled_in_before() -> None:
    fake = FakeBackend(tokenizer=tokenizer(*QWEN))
    fake.reply = fake.encode("x")
    assert (await ask(PATH, fake, prompt="def f(", suffix="return x", stream=False)).json()["response"] == "x"
    assert fake.submitted[0].prompt.text == f"{QWEN[0]}def f({QWEN[1]}return x{QWEN[2]}"
    status, message = error_of(await ask(PATH, prompt="def f(", suffix="return x"))
    assert status == 400 and "suffix is not served for this model" in message


async def test_no_prompt_is_answered_as_loaded() -> None:
    answer = (await ask(PATH, keep_alive="10m")).json()
    assert (answer["done"], answer["done_reason"], answer["response"]) == (True, "load", "")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"raw": True, "system": "Be kind."}, "system is written by the chat template"),
        ({"context": [1, 2]}, "context is not served here: token ids of an earlier answer are not read"),
        ({"images": ["aGk="]}, "text alone"),
        ({"width": 64}, "width is not served here: models here give text alone"),
        ({"prompt": 5}, "prompt: Input should be a valid string"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_with_a_reason(body: dict[str, Any], message: str) -> None:
    status, text = error_of(await ask(PATH, **{"prompt": "Hi", **body}))
    assert status == 400 and message in text, text


async def test_embeddings_have_length_1() -> None:
    answer = (await ask("/api/embed", embedder(), input=["Hello", "Hello you"], keep_alive=0)).json()
    assert np.linalg.norm(answer["embeddings"], axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert answer["prompt_eval_count"] >= 3 and answer["total_duration"] > 0 and answer["model"] == MODEL
    one = (await ask("/api/embed", embedder(), input="Hello")).json()
    assert one["embeddings"] == [pytest.approx(answer["embeddings"][0])]
    old = (await ask("/api/embeddings", embedder(), prompt="Hello")).json()
    assert old == {"embedding": pytest.approx(answer["embeddings"][0])}


async def test_a_text_that_is_too_long_is_cut_unless_a_request_turns_it_off() -> None:
    assert (await ask("/api/embed", embedder(), input="word " * 2000)).status_code == 200
    status, message = error_of(await ask("/api/embed", embedder(), input="word " * 2000, truncate=False))
    assert status == 400 and "maximum context length" in message


async def test_no_text_has_no_embedding() -> None:
    assert (await ask("/api/embed", embedder(), input="")).json()["embeddings"] == []
    assert (await ask("/api/embeddings", embedder())).json() == {"embedding": []}


async def test_a_model_of_the_other_kind_is_refused() -> None:
    status, message = error_of(await ask("/api/embed", input="Hi"))
    assert status == 400 and "generates text and gives no numbers" in message
    status, message = error_of(await ask(PATH, embedder(), prompt="Hi"))
    assert status == 400 and "gives numbers" in message
