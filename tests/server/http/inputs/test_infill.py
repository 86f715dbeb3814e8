"""`suffix` of /v1/completions: filled in where the tokenizer has tokens for it, refused by name where it has none."""

from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.server.fakes import BUNDLED, MODEL, FakeBackend
from tests.server.http.serving import client, serving

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
LLAMA = ("<PRE>", "<SUF>", "<MID>")
DEEP = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer(*tokens: str, special: bool = True) -> Tokenizer:
    """The bundled one with more tokens."""
    made = load_tokenizer(BUNDLED)
    made.backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in tokens])
    return Tokenizer(made.backend, made.special_tokens, made.chat_template, made._load)


async def ask(fake: FakeBackend, **body: Any) -> Any:
    async with client(fake) as http:
        return await http.post("/v1/completions", json={"max_tokens": 4, **body})


@pytest.mark.parametrize("marks", [QWEN, STAR, LLAMA, DEEP])
@pytest.mark.parametrize("special", [True, False])  # Qwen's are none of its special tokens
async def test_prompt_and_suffix_stand_between_the_models_tokens(marks: tuple[str, ...], special: bool) -> None:
    fake = FakeBackend(tokenizer=tokenizer(*marks, special=special))
    answer = await ask(fake, prompt=["def f(", "a"], suffix="\n    return 1")
    assert answer.status_code == 200, answer.text
    assert fake.tokenizer is not None
    begin, hole, end = (fake.tokenizer.token_id(mark) for mark in marks)
    for submitted, prompt in zip(fake.submitted, ("def f(", "a"), strict=True):
        ids = submitted.prompt.token_ids
        bos = [fake.tokenizer.bos_id] if ids[0] == fake.tokenizer.bos_id else []
        before = fake.tokenizer.encode(prompt, add_special_tokens=False)
        after = fake.tokenizer.encode("\n    return 1", add_special_tokens=False)
        assert ids == [*bos, begin, *before, hole, *after, end]


async def test_an_empty_prompt_is_filled_in_and_an_empty_suffix_asks_for_nothing() -> None:
    fake = FakeBackend(tokenizer=tokenizer(*QWEN))
    assert (await ask(fake, prompt="", suffix="end")).status_code == 200
    assert (await ask(fake, prompt="x", suffix="")).status_code == 200
    assert (await ask(fake, prompt="x", suffix=None)).status_code == 200
    assert fake.tokenizer is not None
    assert [fake.tokenizer.token_id(QWEN[0]) in each.prompt.token_ids for each in fake.submitted] == [
        True,
        False,
        False,
    ]


async def test_it_ends_where_the_model_says_that_the_gap_is_filled() -> None:
    made = tokenizer(*QWEN, "<|fim_pad|>")
    pad = made.token_id("<|fim_pad|>")
    fake = FakeBackend(tokenizer=made)
    fake.reply = [*made.encode("ab", add_special_tokens=False), pad, *made.encode("more", add_special_tokens=False)]
    [choice] = (await ask(fake, prompt="x", suffix="y", max_tokens=20)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", pad)
    [choice] = (await ask(fake, prompt="x", max_tokens=20)).json()["choices"]
    assert "more" in choice["text"]


async def test_a_model_without_such_tokens_says_so() -> None:
    answer = await ask(FakeBackend(), prompt="x", suffix="end")
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["param"], error["code"]) == ("suffix", "unsupported_field")
    assert "<|fim_prefix|>" in error["message"] and "tokenizer" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": [[1, 2], [3]]}, "suffix"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "x", "suffix": 5}, "suffix"),
        ({"prompt": "x", "suffix": "word " * 2000}, "prompt"),  # longer than the context
        ({"prompt": "x<|fim_middle|>", "suffix": "y"}, "prompt"),
        ({"prompt": "x", "suffix": "y<|fim_suffix|>"}, "suffix"),
        ({}, "prompt"),
    ],
)
async def test_what_cannot_be_filled_in(body: dict[str, Any], param: str) -> None:
    answer = await ask(FakeBackend(tokenizer=tokenizer(*QWEN)), **{"suffix": "end", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_the_openai_client_fills_in() -> None:
    with serving(FakeBackend(tokenizer=tokenizer(*STAR))) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as ai:
            made = ai.completions.create(model=MODEL, prompt="def f(", suffix="return 1", max_tokens=3)
    assert made.usage is not None and made.usage.completion_tokens == 3
