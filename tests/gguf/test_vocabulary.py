"""What a GGUF file says of its vocabulary and its answers: read, or refused in one line."""

from typing import Any

import pytest

from quintet.gguf.defaults import generation, templates
from quintet.gguf.names import unpermuted_rows
from quintet.gguf.tokenizer import backend
from quintet.gguf.vocabulary import read_vocabulary

BPE: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "<|im_end|>"],
    "token_type": [1, 1, 1, 3],
    "merges": ["a b"],
    "eos_token_id": 3,
}
SPM: dict[str, Any] = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"], "scores": [0.0, 0.0, 0.0, -1.0]}


def _said(entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in {**entries, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({}, "it has no tokenizer (tokenizer.ggml.model)"),
        ({"model": "rwkv"}, "of the kind 'rwkv' (RWKV's own), and quintet reads llama, gpt2, gemma4, bert, t5"),
        ({"model": "plamo2"}, "of the kind 'plamo2' (PLaMo 2's own)"),
        ({"model": 5}, "of the kind '5' (unknown)"),
        ({**BPE, "pre": "qwen-2"}, "'qwen-2', is not a known pre-tokenizer (the nearest is 'qwen2')"),
        ({**BPE, "tokens": None}, "it has no tokens"),
        ({**BPE, "tokens": [1, 2]}, "tokenizer.ggml.tokens holds what is no text"),
        ({**BPE, "tokens": "ab"}, "tokenizer.ggml.tokens is no list of up to"),
        ({**BPE, "tokens": ["a", "b", "a", "c"]}, "tokens 0 and 2 are both 'a'"),
        ({**BPE, "token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 4 tokens"),
        ({**BPE, "token_type": ["x"] * 4}, "tokenizer.ggml.token_type holds what is no finite int"),
        ({**BPE, "merges": None}, "it has no merges"),
        ({**BPE, "merges": ["ab"]}, "its merge 0 is 'ab', not two parts"),
        ({**BPE, "add_bos_token": 1}, "tokenizer.ggml.add_bos_token is '1', not true or false"),
        ({**BPE, "add_bos_token": True}, "it says that a text has BOS and names no bos_token_id"),
        ({**BPE, "eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x', not a token's number"),
        ({**SPM, "scores": [0.0, 0.0, 0.0, float("nan")]}, "tokenizer.ggml.scores holds what is no finite float"),
    ],
)
def test_what_cannot_be_is_named(entries: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        read_vocabulary(_said(entries))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_past_the_end_are_none() -> None:
    assert "eos" not in read_vocabulary(_said(BPE, eos_token_id=99)).special_ids
    assert read_vocabulary(_said(SPM, eos_token_id=99)).special_ids["eos"] == 2


def test_tokens_that_are_no_text_have_a_place() -> None:
    vocabulary = read_vocabulary(_said(BPE, tokens=["a", "b", "", "\udcff"]))
    assert list(vocabulary.tokens) == ["a", "b", "[EMPTY_2]", "[BYTES_3]"]
    assert backend(vocabulary).encode("ab").ids == [0, 1]  # what the merge makes is no token


def test_every_token_that_ends_an_answer_is_found() -> None:
    tokens = ["a", "<|im_end|>", "<|endoftext|>", "</s>", "stop", "<|end|>"]
    said = _said(BPE, tokens=tokens, token_type=[1] * 6, merges=["a a"], eos_token_id=None, eot_token_id=4)
    assert generation(said)["eos_token_id"] == [1, 2, 3, 4, 5]
    vocabulary = read_vocabulary(said)
    assert backend(vocabulary).decode([0, 1], skip_special_tokens=True) == "a"


def test_a_harmony_message_ends_no_answer() -> None:
    tokens = ["<|return|>", "<|call|>", "<|end|>", "<|channel|>"]
    said = _said(BPE, tokens=tokens, token_type=[3] * 4, eos_token_id=0)
    assert generation(said)["eos_token_id"] == [0, 1]
    made = backend(read_vocabulary(said))
    assert made.decode([3, 2, 0], skip_special_tokens=True) == "<|channel|><|end|>"


def test_sampling_defaults_have_their_usual_names() -> None:
    said = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1}
    said |= {"general.sampling.mirostat": 2}
    want = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.0, "eos_token_id": [3]}
    assert generation({**said, **_said(BPE)}) == want
    with pytest.raises(ValueError, match=r"general.sampling.temp is 'hot', not a number"):
        generation({"general.sampling.temp": "hot"})


def test_templates_have_names() -> None:
    key = "tokenizer.chat_template"
    assert templates({}) is None
    assert templates({key: "x"}) == "x"
    assert templates({key: "x", f"{key}.tool_use": "y"}) == {"default": "x", "tool_use": "y"}
    with pytest.raises(ValueError, match="tokenizer.chat_template.rag' is no text|is no text"):
        templates({f"{key}.rag": 1})


def test_phi_3_takes_the_spaces_behind_its_tokens() -> None:
    tokens = [*SPM["tokens"], "<|user|>", "\u2581", "<0x0A>"]
    said = _said(SPM, tokens=tokens, scores=[0.0] * 7, token_type=[2, 3, 3, 1, 3, 1, 6], add_space_prefix=False)
    plain, phi = (backend(read_vocabulary(each)) for each in (said, {**said, "general.name": "Phi-3 Mini"}))
    assert plain.encode("<|user|>\na", add_special_tokens=False).ids == [4, 6, 3]
    assert phi.encode("<|user|>\na", add_special_tokens=False).ids == [4, 3]


def test_rows_that_are_no_heads_are_not_turned() -> None:
    assert unpermuted_rows(8, 4) == [0, 2, 1, 3, 4, 6, 5, 7]
    for rows, head_dim in ((8, 1), (8, 3), (8, 6)):
        with pytest.raises(ValueError, match=f"8 rows of queries or keys are no heads of {head_dim} features"):
            unpermuted_rows(rows, head_dim)
