"""Tokenizers out of GGUF files, held against what llama.cpp makes of the same files and texts."""

import gzip
import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from quintet.chat.messages import ChatOptions, render_chat
from quintet.gguf.cursor import Array
from quintet.gguf.file import read_metadata
from quintet.gguf.pretokenizers import WORDS
from quintet.gguf.tokenizer import backend
from quintet.gguf.vocabulary import read_vocabulary
from quintet.tokenizers.token_bytes import TokenBytes
from quintet.tokenizers.tokenizer import load_tokenizer
from tests.helpers.checkpoints.gguf import header

FOLDER = Path(__file__).parents[1] / "data/quantized/gguf/tokenizers"
EXPECTED = json.loads(gzip.decompress((FOLDER / "expected.json.gz").read_bytes()))
TEXTS: list[str] = EXPECTED.pop("texts")
OTHERS = ("spm", "spm-bare", "gemma4", "wpm")
PRES = [name for name in EXPECTED if name not in OTHERS]
BARE = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}


def _metadata(name: str, **changes: Any) -> dict[str, Any]:
    found = dict(read_metadata(FOLDER / f"{name}.gguf"))
    return found | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _without(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


def assert_cut_alike(name: str, metadata: Mapping[str, Any], texts: set[str] | None = None) -> None:
    vocabulary = read_vocabulary(metadata)
    made, want = backend(vocabulary), EXPECTED[name]
    for text, ids in _kept(want["ids"], texts):
        assert made.encode(text, add_special_tokens=False).ids == ids, repr(text)
    for text, ids in _kept(want["added"], texts):
        assert made.encode(text).ids == ids, repr(text)
    assert list(vocabulary.end_ids) == want["ends"]


def _kept(listed: list[Any], texts: set[str] | None) -> Iterator[tuple[str, Any]]:
    return (pair for pair in zip(TEXTS, listed, strict=False) if texts is None or pair[0] in texts)


@pytest.mark.parametrize("pre", PRES)
def test_byte_level_vocabularies_cut_texts_as_llama_cpp_does(pre: str) -> None:
    """Apart from `</s>`, a normal token of the file, which llama.cpp makes a control token and the original does
    not."""
    assert_cut_alike(pre, _metadata("bpe", pre=pre), {text for text in TEXTS if "</s>" not in text})


def test_every_way_to_cut_is_held_against_llama_cpp() -> None:
    tried = {WORDS[pre] for pre in PRES} | {WORDS["gemma4"]}
    same = {words.patterns for words in tried}
    assert {name for name, words in WORDS.items() if words not in tried and words.patterns not in same} == set()


def test_sentencepiece_merges_by_scores() -> None:
    assert_cut_alike("spm", _metadata("spm"))


def test_sentencepiece_adds_what_the_file_says() -> None:
    assert_cut_alike("spm-bare", _metadata("spm", **BARE))


def test_merges_over_whole_lines() -> None:
    assert_cut_alike("gemma4", _metadata("gemma4"))


def test_wordpiece_reads_words() -> None:
    """BERT's own tokenizer takes Hangul apart whole and keeps marks that take room; llama.cpp does neither."""
    odd = {"Mc", "Me"}
    texts = {
        text
        for text in TEXTS
        if not any("\uac00" <= letter <= "\ud7a3" or unicodedata.category(letter) in odd for letter in text)
    }
    assert len(texts) > 150
    assert_cut_alike("wpm", _metadata("wpm"), texts)


@pytest.mark.parametrize(("file", "name", "changes"), [("bpe", "default", {}), ("spm", "spm-bare", BARE)])
def test_tokens_become_the_text_again(file: str, name: str, changes: Any) -> None:
    made = backend(read_vocabulary(_metadata(file, **changes)))
    for ids, text in zip(EXPECTED[name]["ids"], EXPECTED[name]["text"], strict=True):
        assert made.decode(ids, skip_special_tokens=False) == text


# ------------------------------------------------------------------------------------------------ as the engine has it


def _file(folder: Path, metadata: Mapping[str, Any]) -> Path:
    file = folder / "model.gguf"
    lists = (list, Array)
    file.write_bytes(header({key: list(each) if isinstance(each, lists) else each for key, each in metadata.items()}))
    return file


TEMPLATE = "{% for each in messages %}<|im_start|>{{ each.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return _file(tmp_path, _metadata("bpe", pre="qwen2") | {"tokenizer.chat_template": TEMPLATE})


def test_a_file_is_loaded_as_a_folder_is(chat: Path) -> None:
    tokenizer = load_tokenizer(chat)
    assert tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.eos_ids == (tokenizer.token_id("<|im_end|>"),)
    assert tokenizer.pieces is not None
    text = "hi <|im_start|>you<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "hi you"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.hf.encode(text) == ids
    assert tokenizer.hf.eos_token == "<|im_end|>"


def test_the_chat_template_is_rendered(chat: Path) -> None:
    tokenizer = load_tokenizer(chat)
    prompt = render_chat(tokenizer, [{"role": "user", "content": "Hello"}], ChatOptions())
    assert list(prompt.token_ids) == tokenizer.encode("<|im_start|>Hello<|im_end|>")


def test_a_second_load_reads_no_vocabulary(chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer(chat)
    monkeypatch.setattr("quintet.gguf.vocabulary.read_vocabulary", lambda metadata: pytest.fail("read again"))
    second = load_tokenizer(chat)
    assert second.backend.to_str() == first.backend.to_str()
    assert (second.special_tokens, second.chat_template) == (first.special_tokens, first.chat_template)


@pytest.mark.parametrize("name", ["bpe", *OTHERS])
def test_a_cached_tokenizer_is_the_fresh_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of file: the same description, ids of all texts, ends and bytes of tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = _file(tmp_path, _metadata("spm" if name == "spm-bare" else name, **(BARE if name == "spm-bare" else {})))
    fresh, cached = load_tokenizer(file), load_tokenizer(file)
    assert len(list((tmp_path / "cache").rglob("*.reading"))) == 1 and cached.backend is not fresh.backend
    assert cached.backend.to_str() == fresh.backend.to_str()
    assert [cached.encode(text) for text in TEXTS] == [fresh.encode(text) for text in TEXTS]
    assert cached.eos_ids == fresh.eos_ids and cached.added == fresh.added and cached.vocab_size == fresh.vocab_size
    numbers = range(fresh.vocab_size)
    assert [cached.token_bytes(each) for each in numbers] == [fresh.token_bytes(each) for each in numbers]


def test_a_tokenizer_is_not_taken_from_another_file(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_tokenizer(chat)
    _file(tmp_path, _metadata("bpe", pre="qwen2", eos_token_id=5) | {"tokenizer.chat_template": TEMPLATE})
    assert load_tokenizer(chat).eos_ids == (5,)


def test_letters_of_unused_bytes_are_letters() -> None:
    """Vocabularies of DeepSeek's name those of bytes that no UTF-8 has as tokens of their own."""
    metadata = _metadata("bpe")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    given = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    kinds = [4 if token in "ÀÁöÿ" else kind for token, kind in given]
    made = backend(read_vocabulary(metadata | {"tokenizer.ggml.token_type": kinds}))
    text = "schön Àÿ Á é"
    ids = made.encode(text).ids
    assert made.token_to_id("ö") in ids
    assert made.decode(ids) == text
    pieces = TokenBytes.read(made)
    assert pieces is not None
    assert b"".join(pieces[each] for each in ids) == text.encode()


def test_a_token_of_endless_letters_is_refused() -> None:
    """Each of its places would be tried as a merge's."""
    metadata = _metadata("spm")
    tokens = [*metadata["tokenizer.ggml.tokens"]]
    tokens[-1] = "a" * 5000
    with pytest.raises(ValueError, match=rf"token {len(tokens) - 1} of the file has 5000 letters, and 1024 are read"):
        backend(read_vocabulary(metadata | {"tokenizer.ggml.tokens": tokens}))
