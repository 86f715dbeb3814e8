"""An encoder-decoder of text with a tokenizer: in Python and over HTTP, the prompt is the encoder's text."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quintet import LLM, SamplingParams
from quintet_tools.checkpoints.encoder_decoders import ENCODER_DECODERS, written
from tests.e2e.families.test_encoder_decoders import greedy
from tests.helpers.servers.serving import PATIENCE, Server

COUNT = 12
START, BEGIN = 258, 256  # </s>, with which a decoder begins, and <s>
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXTS = ["Guten Morgen.", "a", "One, two, three, four, five, six, seven, eight"]


@functools.cache
def small_bart() -> Any:
    """Returns a checkpoint with a token for each byte; the tokenizer puts <s> and </s> around a text, as BART's."""
    entries = {"vocab_size": 262, "bos_token_id": 256, "pad_token_id": 257, "eos_token_id": START}
    tiny = written({**ENCODER_DECODERS["bart"], **entries, "decoder_start_token_id": START})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "<pad>", "</s>")])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", START)])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>").save_pretrained(tiny.folder)
    return tiny


def encoded(text: str, special: bool = True) -> list[int]:
    backend = PreTrainedTokenizerFast(tokenizer_file=str(Path(small_bart().folder) / "tokenizer.json"))
    return list(backend(text, add_special_tokens=special)["input_ids"])


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By transformers, of token ids that its tokenizer gives."""
    return [wanted(encoded(text), [START]) for text in TEXTS]


def wanted(source: list[int], decoder: list[int]) -> list[int]:
    return greedy(small_bart(), source, decoder, COUNT)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(str(small_bart().folder), num_pages=200, use_tqdm=False, **SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "bart", "--num-pages", "200")
    with Server(str(small_bart().folder), *flags) as made:
        yield made


def tokens(llm: LLM, prompts: Any) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, PARAMS, use_tqdm=False)]


def test_texts_are_the_encoders(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens(llm, TEXTS) == expected
    assert tokens(llm, [{"prompt": text} for text in TEXTS]) == expected
    assert tokens(llm, [{"encoder_prompt": text, "decoder_prompt": None} for text in TEXTS]) == expected
    [output] = llm.generate(TEXTS[:1], PARAMS, use_tqdm=False)
    assert output.prompt == TEXTS[0] and output.prompt_token_ids == [START]


def test_a_decoders_text_follows_the_start_token(llm: LLM) -> None:
    pair = {"encoder_prompt": TEXTS[0], "decoder_prompt": "Good"}
    assert tokens(llm, [pair]) == [wanted(encoded(TEXTS[0]), [START, *encoded("Good", special=False)])]


def test_chats_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="chat template|encoder takes the prompt"):
        llm.chat([{"role": "user", "content": "Hello"}], PARAMS, use_tqdm=False)


def post(server: Server, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "bart", **body}, timeout=PATIENCE)


def test_completions_have_the_encoders_text_as_prompt(server: Server, expected: list[list[int]]) -> None:
    answer = post(server, prompt=TEXTS, temperature=0, max_tokens=COUNT, ignore_eos=True, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    assert [each["token_ids"] for each in answer.json()["choices"]] == expected
    assert answer.json()["usage"]["prompt_tokens"] == sum(len(encoded(text)) + 1 for text in TEXTS)
    same = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    ids = post(server, prompt=encoded(TEXTS[0]), **same)
    assert [each["token_ids"] for each in ids.json()["choices"]] == expected[:1]


@pytest.mark.parametrize(
    ("body", "why"),
    [({"prompt": "x" * 63}, "65"), ({"prompt": [5] * 65}, "65"), ({"prompt": [9999]}, "9999")],
    ids=["a long text", "many tokens", "a token beyond"],
)
def test_what_an_encoder_does_not_take_is_400(server: Server, body: dict[str, Any], why: str) -> None:
    answer = post(server, **body, max_tokens=2)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text


def test_other_routes_say_why_not(server: Server) -> None:
    chat = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
    assert chat.status_code == 400, chat.text
    files = {"file": ("a.wav", b"RIFF", "audio/wav")}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files=files, data={"model": "bart"}, timeout=PATIENCE)
    assert 400 <= answer.status_code < 500, answer.text
