"""Grammars go by the bytes of tokens: text that encodes to other bytes than it has, and markers that are tokens."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from quintet import LLM, SamplingParams, StructuredOutputsParams
from quintet.engine.request import CoreRequest, Request
from quintet.sampling_params import ParameterError
from quintet.structured_output.grammar import GrammarCompiler
from quintet.tokenizers.tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")

EOS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CALL = {"type": "json_schema", "json_schema": {"const": 1}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    served = LLM("bundled", max_model_len=256)
    yield served
    served.close()


CASES: list[tuple[dict[str, Any], str]] = [  # report 1
    ({"choice": ["<think>one"]}, "<think>one"),
    ({"choice": ["a <think> b"]}, "a <think> b"),
    ({"choice": ["</s> is a tag"]}, "</s> is a tag"),
    ({"choice": ["yes </think>", "no </think>"]}, "(yes|no) </think>"),
    ({"regex": "<think>[a-z]{3}</think>[0-9]"}, "<think>[a-z]{3}</think>[0-9]"),
    ({"json": {"const": "<tool_call>"}}, '"<tool_call>"'),
    ({"json": {"enum": ["<|end|>"]}}, r'"<\|end\|>"'),
    ({"grammar": 'root ::= "<think>" [a-z] "</think>"'}, "<think>[a-z]</think>"),
    ({"grammar": 'start: <think> "a" <|user|> "b"'}, r"<think>a<\|user\|>b"),
]


@pytest.mark.parametrize(("wanted", "pattern"), CASES)
def test_the_text_of_an_added_token_comes(llm: LLM, wanted: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, skip_special_tokens=False, structured_outputs=wanted)
    output = llm.generate(["x"], params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop" and re.fullmatch(pattern, output.text), output


def test_hidden_tokens_are_never_text(llm: LLM) -> None:
    """report 1: with special tokens left out of the text, it is still what the grammar asks for."""
    wanted = {"choice": ["</s><|end|> is a tag"]}
    output = llm.generate(["x"], SamplingParams(max_tokens=60, structured_outputs=wanted), use_tqdm=False)[0].outputs[0]
    assert output.text == "</s><|end|> is a tag"


def tokenizer_of(folder: Path, decoder: Any, byte_fallback: bool = True, normalizer: Any = None) -> Tokenizer:
    """A vocabulary as Llama 2's, of bytes, letters and some pairs; `<mark>` is special, `<tag>` is not."""
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback), "▁"]
    words += [chr(code) for code in range(33, 127)]
    merges = [("▁", letter) for letter in LETTERS] + [("▁h", "i"), ("▁b", "y")]
    vocabulary = {word: number for number, word in enumerate([*words, *map("".join, merges)])}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([*([normalizer] if normalizer else []), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_special_tokens(["<s>", "</s>", "<unk>", "<mark>"])
    backend.add_tokens(["<tag>"])
    return Tokenizer.from_transformers(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def written(tokenizer: Tokenizer, **wanted: Any) -> str:
    """The text of the first tokens that the grammar allows, one after the other, as the tokenizer decodes it."""
    grammars = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, [EOS])
    try:
        matcher = grammars.matcher(grammars.compile_and_wait(StructuredOutputsParams(**wanted)))
    finally:
        grammars.close()
    request = Request(CoreRequest("x", [tokenizer.token_id("x") or 0], SamplingParams(), (0, 0), 200))
    while not matcher.complete:
        assert (why := matcher.advance(request)) == "", why
        ids = matcher.allowed_after(request.token_ids[1:])
        if matcher.complete or ids is None:
            break
        assert matcher.num_forced == 0 or ids.tolist() == [matcher.forced_token()]
        request.append_sampled(int(ids[0]))
    return tokenizer.decode(request.token_ids)[1:].removesuffix("</s>")


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
SERVED = {
    "Llama 2": decoders.Sequence(LLAMA), "Gemma": decoders.Sequence(LLAMA[:3]),
    "Metaspace": decoders.Metaspace("▁", "always"), "Metaspace, never": decoders.Metaspace("▁", "never"),
    "Metaspace and Fuse": decoders.Sequence([decoders.Metaspace("▁", "always"), decoders.Fuse()]),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_each_decoder_whose_tokens_have_bytes_is_served(tmp_path: Path, name: str) -> None:
    """report 10"""
    tokenizer = tokenizer_of(tmp_path, SERVED[name], "Metaspace" not in name)
    assert written(tokenizer, choice=["x hi by"]) == "x hi by"
    assert json.loads(written(tokenizer, json={"const": "hi by"})) == "hi by"
    assert written(tokenizer, choice=["a<tag>b <mark> </s>c"]) == "a<tag>b <mark> </s>c"


REFUSED = {
    "ByteFallback, Metaspace": [decoders.ByteFallback(), decoders.Metaspace("▁", "always"), decoders.Fuse()],
    "Fuse, Replace": [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")],
    "Strip": [*LLAMA[:3], decoders.Strip(" ", 1, 1)],
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_decoders_are_refused_before_anything_runs(tmp_path: Path, name: str) -> None:
    """report 10"""
    with pytest.raises(ParameterError, match=name):
        written(tokenizer_of(tmp_path, decoders.Sequence(REFUSED[name])), choice=["x"])


def test_text_that_no_token_can_write_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """report 10"""
    with pytest.raises(ParameterError, match="no tokens for a text"):
        written(tokenizer_of(tmp_path, SERVED["Metaspace"], byte_fallback=False), choice=["né 中"])


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()])
def test_text_that_a_normalizer_would_change_comes_as_it_is(tmp_path: Path, normalizer: Any) -> None:
    """report 1"""
    tokenizer = tokenizer_of(tmp_path, SERVED["Gemma"], normalizer=normalizer)
    for text in ("cafe\u0301 Noir", "\ufb01sh", "\uff11\uff12 A"):
        assert written(tokenizer, choice=[text]) == text
        assert written(tokenizer, json={"const": text}) == f'"{text}"'


@pytest.mark.parametrize("marker", ["<tag>", "<mark>"])
def test_a_marker_that_is_a_token_triggers(tmp_path: Path, marker: str) -> None:
    """report 2: in free text the token is let, and the tag follows; so it does at the start, and as an end."""
    tokenizer = tokenizer_of(tmp_path, SERVED["Gemma"])
    token = tokenizer.token_id(marker)
    assert token is not None
    tag = {"type": "tag", "begin": marker, "content": CALL, "end": marker}
    free = {"type": "triggered_tags", "triggers": [marker], "tags": [tag]}
    grammars = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size, [EOS])
    for form, before in (
        (tag, []),
        (free, []),
        (free, [tokenizer.token_id("x")]),
        ({**free, "at_least_one": True}, []),
    ):
        wanted = StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})
        matcher = grammars.matcher(grammars.compile_and_wait(wanted))
        allowed = matcher.allowed_after(before)
        assert allowed is not None and token in allowed
        after = matcher.allowed_after([*before, token])
        assert after is not None and {tokenizer.token_bytes(each) for each in after.tolist()} == {b"1"}
        one = tokenizer.token_id("1")
        end = matcher.allowed_after([*before, token, one])
        assert end is not None and token in end and tokenizer.token_id("a") not in end
    grammars.close()
