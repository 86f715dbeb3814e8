"""/props, /slots, /lora-adapters, /apply-template, /tokenize, /detokenize and /embedding in llama.cpp's forms."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.pooling.test_embeddings import backend as embedder
from tests.server.http.serving import chat, client


async def ask(path: str, fake: FakeBackend | None = None, **body: Any) -> Any:
    async with client(fake) as http:
        answer = await (http.post(path, json=body) if body else http.get(path))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_props_have_context_template_and_defaults() -> None:
    props = await ask("/props", FakeBackend().with_defaults(temperature=0.6, max_tokens=99))
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512 and settings["params"]["temperature"] == 0.6
    assert settings["params"]["n_predict"] == 99 and props["model_path"] == MODEL
    assert "<|assistant|>" in props["chat_template"] and props["bos_token"] == "<s>" and not props["is_sleeping"]
    assert props["total_slots"] == 16000 // 512 and props["modalities"]["vision"] is False
    async with client() as http:
        assert (await http.post("/props", json={})).status_code == 405


async def test_a_slot_is_processing_for_each_running_request() -> None:
    assert not any(slot["is_processing"] for slot in await ask("/slots"))
    fake = FakeBackend(hang=1, max_model_len=16000)
    async with client(fake) as http:
        running = asyncio.create_task(http.post("/completion", json={"prompt": "Hi", "n_predict": 3}))
        while not fake.hanging:
            await asyncio.sleep(0)
        assert [slot["is_processing"] for slot in (await http.get("/slots")).json()] == [True]
        assert (await http.get("/slots?fail_on_no_slot=1")).status_code == 503
        fake.go_on.set()
        assert (await running).status_code == 200


async def test_no_adapter_is_listed() -> None:
    assert await ask("/lora-adapters") == []


async def test_a_template_is_applied() -> None:
    assert await ask("/apply-template", **chat("x")) == {"prompt": "<s><|user|>x<|end|><|assistant|>"}


async def test_content_is_tokenized_in_llamacpps_form_and_a_prompt_in_vllms() -> None:
    assert await ask("/tokenize", content="Hello") == {"tokens": [853]}
    assert await ask("/tokenize", content="Hello", add_special=True) == {"tokens": [0, 853]}
    pieces = (await ask("/tokenize", content="wö", with_pieces=True))["tokens"]
    assert [piece["piece"] for piece in pieces] == ["w", [195], [182]]
    assert (await ask("/tokenize", prompt="Hello"))["count"] == 2
    assert (await ask("/detokenize", tokens=[853]))["content"] == "Hello"


@pytest.mark.parametrize(
    ("body", "param"),
    [({"content": "x", "prompt": "x"}, "content"), ({"content": "x", "parse_special": False}, "parse_special")],
)
async def test_what_cannot_be_tokenized_is_refused(body: dict[str, Any], param: str) -> None:
    async with client() as http:
        answer = await http.post("/tokenize", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_embeddings_are_lists_in_a_list(path: str) -> None:
    found = await ask(path, embedder(), content=["Hello", "you"])
    assert [entry["index"] for entry in found] == [0, 1]
    assert np.linalg.norm(found[0]["embedding"][0]) == pytest.approx(1, abs=1e-5)
    plain = await ask(path, embedder(), input="Hello", embd_normalize=-1)
    assert len(plain[0]["embedding"]) == 1
    async with client(embedder()) as http:
        assert (await http.post(path, json={"content": "x", "embd_normalize": 1})).status_code == 400
