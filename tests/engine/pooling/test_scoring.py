"""Pairs are made as transformers makes them, and compared as torch compares them."""

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quintet.engine.pooling.scoring import PairLimits, PairTemplate, cosine, max_sim, pairs
from quintet.tokenizers.tokenizer import Tokenizer

WORDS = "what is the capital of france paris berlin germany a b c d e f g".split()


@pytest.fixture(scope="module")
def hf() -> PreTrainedTokenizerFast:
    """A tokenizer of BERT's kind."""
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = Backend(models.WordLevel(vocabulary, "[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def _types(raw: bytes, count: int) -> list[int]:
    return np.frombuffer(raw, np.int32).tolist() if raw else [0] * count


@pytest.mark.parametrize("most", [None, 30, 11, 10, 9, 8, 7, 6, 4, 3])
@pytest.mark.parametrize("texts", [("what is the capital", "a b c d e f g"), ("a b c d e f g", "paris"), ("a", "b"),
                                   ("a b c d", "d e f g")])  # fmt: skip
def test_pairs_as_transformers_makes_them(hf: Any, texts: tuple[str, str], most: int | None) -> None:
    cut = {} if most is None else {"truncation": True, "max_length": most}
    theirs = hf(*texts, return_token_type_ids=True, **cut)
    ours = PairTemplate(Tokenizer.from_transformers(hf)).prompt(*texts, PairLimits(pair=most))
    assert ours.token_ids == theirs["input_ids"]
    assert _types(ours.types, len(ours.token_ids)) == theirs["token_type_ids"]


def test_each_text_is_cut_by_itself(hf: Any) -> None:
    template = PairTemplate(Tokenizer.from_transformers(hf))
    assert template.prompt("what is the capital", "a b c d", PairLimits(2, 3)) == template.prompt("what is", "a b c")


def test_texts_without_a_separator(hf: Any) -> None:
    ours = PairTemplate(Tokenizer.from_transformers(hf), has_separator=False).prompt("what is ", "paris")
    assert ours.token_ids == hf("what is paris")["input_ids"] and ours.types == b""


def test_a_template_of_ones_own(hf: Any) -> None:
    jinja = "{% for m in messages %}{{ m.role == 'query' and 'what' or 'is' }} {{ m.content }} {% endfor %}"
    ours = PairTemplate(Tokenizer.from_transformers(hf), jinja).prompt("france", "paris")
    assert ours.token_ids == hf("what france is paris")["input_ids"]


def test_one_query_with_each_document_or_one_each() -> None:
    assert pairs(["q"], ["a", "b"]) == [("q", "a"), ("q", "b")]
    assert pairs(["q", "r"], ["a", "b"]) == [("q", "a"), ("r", "b")]
    with pytest.raises(ValueError, match="must be either 1:1, 1:N or N:N, not 2:3"):
        pairs(["q", "r"], ["a", "b", "c"])
    with pytest.raises(ValueError, match="must be either 1:1, 1:N or N:N, not 2:1"):
        pairs(["q", "r"], ["a"])
    with pytest.raises(ValueError, match="At least one text element must be given"):
        pairs([], ["a"])
    with pytest.raises(ValueError, match="At least one text_pair element must be given"):
        pairs(["q"], [])


def test_cosine_is_torchs() -> None:
    a, b = torch.randn(2, 64)
    theirs = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0)
    assert cosine(a.numpy(), b.numpy()) == pytest.approx(float(theirs), abs=1e-12)
    assert cosine(a.numpy(), np.zeros(64, np.float32)) == 0.0


def test_cosine_stays_within_its_ends() -> None:
    """Clients check it, and rounding went past 1."""
    for seed in range(50):
        x = np.random.default_rng(seed).standard_normal(384).astype(np.float32)
        assert 1 - 1e-12 < cosine(x, x) <= 1.0 and -1.0 <= cosine(x, -x) < -1 + 1e-12


def test_max_sim_adds_each_query_tokens_best() -> None:
    query, document = torch.randn(5, 16), torch.randn(9, 16)
    theirs = sum(max(float(q @ d) for d in document) for q in query)
    assert max_sim(query.numpy(), document.numpy()) == pytest.approx(theirs, rel=1e-5)
