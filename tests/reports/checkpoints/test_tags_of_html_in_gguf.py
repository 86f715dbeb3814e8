"""`</s>` that a byte-level GGUF vocabulary has as a normal token is text, as in the model's original; in
other vocabularies, and where it is the EOS, it is a control token."""

from typing import Any

import pytest

from quintet.gguf.defaults import generation
from quintet.gguf.tokenizer import backend
from quintet.gguf.vocabulary import TokenKind, read_vocabulary
from tests.gguf.test_vocabulary import BPE, SPM, _said

TOKENS = ["<", "/", "s", ">", "a", "</s>", "<|im_end|>"]


def said(base: dict[str, Any], kind: int, **more: Any) -> dict[str, Any]:
    kinds = [1, 1, 1, 1, 1, int(kind), 1]
    return _said(base, tokens=TOKENS, token_type=kinds, scores=[0.0] * 7, **more)


def test_a_normal_token_of_a_byte_level_vocabulary_is_text() -> None:
    given = said(BPE, TokenKind.NORMAL, merges=["a a"], eos_token_id=6)
    vocabulary, made = read_vocabulary(given), backend(read_vocabulary(given))
    assert vocabulary.kinds[5] == TokenKind.NORMAL and vocabulary.kinds[6] == TokenKind.CONTROL
    assert made.encode("a</s>", add_special_tokens=False).ids == [4, 0, 1, 2, 3]
    assert made.decode([4, 0, 1, 2, 3]) == "a</s>"
    assert generation(given)["eos_token_id"] == [5, 6]


@pytest.mark.parametrize(
    ("base", "kind", "more"),
    [
        (BPE, TokenKind.CONTROL, {"merges": ["a a"], "eos_token_id": 6}),
        (BPE, TokenKind.NORMAL, {"merges": ["a a"], "eos_token_id": 5}),
        (SPM, TokenKind.NORMAL, {"eos_token_id": 6, "bos_token_id": 4, "unknown_token_id": 0}),
    ],
)
def test_an_end_of_text_is_a_control_token(base: dict[str, Any], kind: int, more: dict[str, Any]) -> None:
    assert read_vocabulary(said(base, kind, **more)).kinds[5] == TokenKind.CONTROL
