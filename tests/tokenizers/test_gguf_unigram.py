"""The unigram vocabulary of a GGUF file by llama.cpp's converter, against transformers' XLMRobertaTokenizer."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from quintet.gguf.file import read_metadata
from quintet.gguf.tokenizer import backend
from quintet.gguf.vocabulary import read_vocabulary
from quintet.tokenizers.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[1] / "data/quantized/gguf"
FILE = FOLDER / "xlm-roberta.gguf"
METADATA = dict(read_metadata(FILE))
MADE = backend(read_vocabulary(METADATA))
ORIGINAL = Tokenizer.from_file(str(FOLDER / "tokenizers/xlm-roberta.json"))  # saved by transformers' class
LAST = 351  # <mask>
TEXTS: list[str] = json.loads(gzip.decompress((FOLDER / "tokenizers/expected.json.gz").read_bytes()))["texts"]
WORST = [
    *("", " ", "\t\n", "<mask>", "a <mask>b", "x</s> y<s>", "<unk><pad>", "[PAD350]", f"[UNUSED {LAST}]"),
    *("\u2581 \u2581a\u2581", "a\x00b\x01\x7f\x85c\xad", "a\u200bb\ufeffc\u2028d", "\uff28\uff45\uff4c\u3000\uff11"),
    *("e\u0301\u0301 \u0344 \u212b", "\ufb01\ufb03 \u2460\u00bd\u2122", "   many    spaces\t\ttabs\r\n\nlines   "),
    *("\U0001f468\u200d\U0001f469\ufe0f\U0001f3fd", "\u0645\u0631\u062d\u0628\u0627\u064e", "\u4e16\U00020bb7\uac00"),
]
LETTERS = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(sorted(set("".join(TEXTS)))))


def assert_original(text: str) -> None:
    assert MADE.encode(text).ids == ORIGINAL.encode(text).ids, repr(text)
    pair, wanted = MADE.encode("a", text), ORIGINAL.encode("a", text)
    assert (pair.ids, pair.type_ids) == (wanted.ids, wanted.type_ids), repr(text)


@pytest.mark.parametrize("texts", [TEXTS, WORST], ids=["scripts", "worst"])
def test_texts_have_the_tokens_of_the_original(texts: list[str]) -> None:
    for text in texts:
        assert_original(text)
        ids = ORIGINAL.encode(text).ids
        for skips in (True, False):
            assert MADE.decode(ids, skip_special_tokens=skips) == ORIGINAL.decode(ids, skip_special_tokens=skips)


def test_the_vocabulary_is_tried_whole() -> None:
    """Most tokens are in the texts, unknown ones too; and <mask>, which the converter leaves out, has its number."""
    met = {each for text in (*TEXTS, *WORST) for each in ORIGINAL.encode(text).ids}
    assert len(met) > 280 and {0, 1, 2, 3, LAST} <= met
    assert list(METADATA["tokenizer.ggml.tokens"])[LAST] != "<mask>"
    assert MADE.token_to_id("<mask>") == LAST


@given(st.text(LETTERS))
@example("\x00\u2581")
def test_any_text_has_the_tokens_of_the_original(text: str) -> None:
    assert_original(text)


def test_padding_of_the_vocabulary_changes_no_tokens() -> None:
    """As of models with more embeddings than tokens: unused tokens, far below all scores."""
    metadata = dict(METADATA)
    for name, more in (("tokens", ["[PAD352]", "[PAD353]"]), ("scores", [-10000.0] * 2), ("token_type", [5, 5])):
        metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], *more]
    made = backend(read_vocabulary(metadata))
    assert made.get_vocab_size() == LAST + 3
    for text in (*TEXTS, "[PAD352]"):
        assert made.encode(text).ids == ORIGINAL.encode(text).ids


@pytest.mark.parametrize("rules", [[1], [255] * 8, [0, 0, 0, 0], ["a"], [300]])
def test_rules_of_normalization_that_are_cut_off_are_refused(rules: list[Any]) -> None:
    says = r"tokenizer.ggml.precompiled_charsmap(, \d bytes, is cut off| holds what is no byte)"
    with pytest.raises(ValueError, match=says):
        read_vocabulary(METADATA | {"tokenizer.ggml.precompiled_charsmap": rules})


def test_a_second_load_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fresh, cached = load_tokenizer(FILE), load_tokenizer(FILE)
    assert cached.backend is not fresh.backend
    for text in TEXTS:
        assert fresh.encode(text) == cached.encode(text)
    assert fresh.special_tokens["mask_token"] == cached.special_tokens["mask_token"] == "<mask>"
    assert fresh.hf.encode("Hello") == ORIGINAL.encode("Hello").ids
