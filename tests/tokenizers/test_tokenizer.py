"""Ids as transformers gives them, one BOS, prompts in every form."""

import itertools
import json
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer

import quintet
from quintet.chat.prompts import Prompt, parse_prompts
from quintet.tokenizers import tokenizer as tokenizers
from quintet.tokenizers.token_bytes import TokenBytes
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import tokenizers as builders
from tests.tokenizers.test_detokenizer import HOSTILE

BUNDLED = Path(quintet.__file__).parent / "bundled"
KINDS = ["byte_level", "byte_fallback", "metaspace", "bundled"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS[:3]}
    for kind, folder in made.items():
        getattr(builders, kind)(folder)
    return {**made, "bundled": BUNDLED}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, folders):
    return folders[request.param]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_equal_transformers(tokenizer, folder):
    hf = AutoTokenizer.from_pretrained(folder)

    @settings(derandomize=True, max_examples=50, deadline=None)
    @given(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60)), st.booleans())
    def check(text, special):
        special = special and not text.startswith(hf.bos_token)
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == hf.encode(text, add_special_tokens=special)
        assert tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True)
        if tokenizer.max_chars_per_token is not None:
            assert len(text) <= tokenizer.max_chars_per_token * len(ids)

    check()


def test_a_long_text_is_read_as_a_short_one(tokenizer, monkeypatch):
    """Long texts and many ids go another way through tokenizers: the ids and the text are the same."""

    def same(text, special):
        monkeypatch.setattr(tokenizers, "_LONG", sys.maxsize)
        ids = tokenizer.encode(text, add_special_tokens=special)
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        monkeypatch.setattr(tokenizers, "_LONG", 0)
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        assert [tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)] == texts

    @settings(derandomize=True, max_examples=50, deadline=None)
    @given(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=60)), st.booleans())
    def check(text, special):
        same(text, special)

    check()
    words = [*HOSTILE, *builders.CORPUS, *builders.SPECIAL, "<tool>", "a" * 3000, " " * 300]
    for seed in range(5):
        same("".join(random.Random(seed).choices(words, k=60)), special=True)


def test_word_pieces_of_a_long_text(tmp_path, monkeypatch):
    tokenizer = builders.word_piece(tmp_path)
    text = " ".join(builders.CORPUS * 2)
    ids = tokenizer.encode(text)
    monkeypatch.setattr(tokenizers, "_LONG", sys.maxsize)
    assert ids == tokenizer.encode(text) and len(text) > 2000


def test_a_lone_surrogate_is_named_in_a_long_text(folders):
    tokenizer = load_tokenizer(folders["byte_level"])
    with pytest.raises(ValueError, match="U\\+D800, at character 5000"):
        tokenizer.encode("a" * 5000 + "\ud800")
    with pytest.raises(ValueError, match="U\\+D800"):
        tokenizer.bad_word_ids(["a" * 1000, "b" * 1000, "\ud800"])


@pytest.mark.parametrize("reads", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_read(folders, reads):
    """An event loop among them: no thread is made to give up the interpreter's lock here, each must let go of it."""
    tokenizer = load_tokenizer(folders["bundled"])
    given = {"encode": "Once upon a time " * 60_000, "decode": list(range(300, 500)) * 2000}[reads]
    turns, done = itertools.count(), threading.Event()

    def other():
        while not done.is_set():
            next(turns)
            time.sleep(0)  # lets go of the lock

    before, thread = sys.getswitchinterval(), threading.Thread(target=other)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        first = next(turns)
        getattr(tokenizer, reads)(given)
        last = next(turns)
    finally:
        done.set()
        sys.setswitchinterval(before)
        thread.join()
    assert last - first > 100


def test_text_survives_a_round_trip(folders):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = load_tokenizer(folders[kind])
        for text in HOSTILE:
            if kind == "byte_fallback" and ("▁" in text or "<s>" in text):
                continue  # such a tokenizer writes a space for "▁", and one after each special token
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


class WithoutVocabulary:
    """A backend that makes no copy of its vocabulary."""

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        assert name != "get_vocab"
        return getattr(self._backend, name)


def test_a_vocabularys_extent_is_read_token_by_token(folders):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = load_tokenizer(folders[kind])
        ids = tokenizer.backend.get_vocab(with_added_tokens=True)
        tokenizer.backend = WithoutVocabulary(tokenizer.backend)
        assert (tokenizer.vocab_size, tokenizer.max_chars_per_token) == (max(ids.values()) + 1, max(map(len, ids)))


def test_a_vocabulary_with_gaps_has_the_extent_of_its_largest_id():
    made = Tokenizer(Backend(BPE({"a": 0, "long": 7}, [], byte_fallback=True)), {}, None, lambda: None)
    assert (made.vocab_size, made.max_chars_per_token) == (8, 4)


def test_what_a_vocabulary_knows(tokenizer, folder):
    hf = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(hf) <= tokenizer.vocab_size
    assert tokenizer.bos_id == hf.bos_token_id
    assert tokenizer.eos_ids == (hf.eos_token_id,)
    assert set(hf.all_special_ids) <= tokenizer.special_ids
    text = "Hello world, 你好"
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.removeprefix(" ") == tokenizer.decode(ids)
    assert tokenizer.token_bytes(10**9) == b""
    pieces = TokenBytes.read(hf.backend_tokenizer)
    assert pieces is None or (pieces[10**9], pieces._bytes) == (b"", {})
    assert tokenizer.token_id(tokenizer.bos_token) == tokenizer.bos_id


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [builders.TEMPLATE, builders.TEMPLATE.replace("{{ bos_token }}", "")])
def test_one_bos_never_two(tmp_path, kind, add_bos, template):
    tokenizer = getattr(builders, kind)(tmp_path, add_bos, template)
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.hf.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False)
    written = text.startswith("<s>")
    assert ids.count(tokenizer.bos_id) == written
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text).count(tokenizer.bos_id) == (written or add_bos)
    if written or not add_bos:
        assert tokenizer.encode(text) == ids
    assert tokenizer.encode("Hello").count(tokenizer.bos_id) == add_bos


def test_bad_words_stand_at_the_start_and_after_a_space(folders):
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = load_tokenizer(folders[kind])
        sequences = tokenizer.bad_word_ids([" fox", "fox", "lazy"])
        assert len(set(sequences)) == len(sequences)
        for variant in ("fox", " fox", "lazy", " lazy"):
            assert tuple(tokenizer.encode(variant, add_special_tokens=False)) in sequences
        with pytest.raises(ValueError, match="bad_words: ' ' has no visible"):
            tokenizer.bad_word_ids([" "])


def test_token_text_keeps_the_space_in_front(folders):
    tokenizer = load_tokenizer(folders["byte_fallback"])
    assert [tokenizer.token_text(each) for each in tokenizer.encode("fox", add_special_tokens=False)][0][0] == " "
    assert tokenizer.token_text(tokenizer.token_id("<0xE4>")) == "\ufffd"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    builders.byte_level(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        load_tokenizer(tmp_path)


def test_code_in_a_tokenizers_folder_is_not_run(tmp_path):
    builders.byte_level(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass")
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_truncation_and_padding_in_the_file_are_not_followed(tmp_path):
    tokenizer = builders.byte_level(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    text = "the quick brown fox jumps over the lazy dog"
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)


# ------------------------------------------------------------------------------------------------------------ prompts


@pytest.fixture(scope="module")
def plain(folders):
    return load_tokenizer(folders["byte_level"])


def test_prompts_in_every_form(plain):
    hello = plain.encode("Hello")
    size = plain.vocab_size
    table = {
        "text": ("Hello", [Prompt(hello, "Hello")]),
        "ids": ([1, 2], [Prompt([1, 2])]),
        "numpy's ints": ([np.int64(1), np.int32(2)], [Prompt([1, 2])]),
        "a tuple": ((1, 2), [Prompt([1, 2])]),
        "texts": (["Hello", "Hello"], [Prompt(hello, "Hello")] * 2),
        "lists of ids": ([[1, 2], (3,)], [Prompt([1, 2]), Prompt([3])]),
        "mixed": (["Hello", [1], {"prompt": "Hello"}], [Prompt(hello, "Hello"), Prompt([1]), Prompt(hello, "Hello")]),
        "a dict": ({"prompt_token_ids": [1], "cache_salt": "x"}, [Prompt([1], None, "x")]),
        "ids with their text": ({"prompt_token_ids": [1], "prompt": "shown"}, [Prompt([1], "shown")]),
        "nothing": ([], []),
        "only the BOS": ("", [Prompt([plain.bos_id], "")]),
        "the last id": ([size - 1], [Prompt([size - 1])]),
    }
    for name, (given_, wanted) in table.items():
        assert parse_prompts(given_, plain, size) == wanted, name


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "of type NoneType; a prompt is text"),
        (7, "of type int"),
        (True, "of type bool"),
        (b"bytes", "of type bytes"),
        ([True], "prompt 0 is of type bool"),
        ([1, "a"], "entry 1 is 'a' of type str, not a token id"),
        ([1, True], "entry 1 is True of type bool"),
        ([1, 2.0], "entry 1 is 2.0 of type float"),
        ([1, None], "entry 1 is None"),
        ([1, -1], "token id -1 at entry 1 is not in 0 .. "),
        ([10**12], f"token id {10**12} at entry 0"),
        ([[]], "prompt 0 is empty"),
        (["Hello", []], "prompt 1 is empty"),
        (["Hello", ["a"]], "prompt 1: entry 0 is 'a'"),
        ("bad \ud800 text", r"lone surrogate, U\+D800, at character 4"),
        ({}, "neither 'prompt' nor 'prompt_token_ids'"),
        ({"promt": "a"}, "unknown prompt key 'promt'; did you mean 'prompt'"),
        ({"prompt": "a", "cache_slat": "b"}, "did you mean 'cache_salt'"),
        ({"prompt": 1}, "'prompt' must be text"),
        ({"prompt": "a", "cache_salt": ""}, "'cache_salt' must be text that is not empty"),
        ({"prompt": "a", "cache_salt": 5}, "'cache_salt' must be text"),
        ({"prompt_token_ids": "12"}, "must be a list of ints"),
        ({"prompt_token_ids": []}, "is empty"),
        ({1: 2}, "unknown prompt key '1'"),
    ],
    ids=repr,
)
def test_bad_prompts_are_refused_with_the_reason(plain, prompt, message):
    with pytest.raises(ValueError, match=message):
        parse_prompts(prompt, plain, plain.vocab_size)


def test_a_tokenizer_that_knows_more_than_the_model_is_refused(plain):
    with pytest.raises(ValueError, match="do not belong together"):
        parse_prompts("Hello", plain, 10)


def test_text_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="has no tokenizer; give token ids"):
        parse_prompts("Hello", None, 10)
    assert parse_prompts([1], None, 10) == [Prompt([1])]


def test_an_empty_text_without_bos_is_refused(tmp_path):
    tokenizer = builders.byte_level(tmp_path, add_bos=False)
    with pytest.raises(ValueError, match="is empty: it has no tokens"):
        parse_prompts("", tokenizer, 1000)
