"""Incremental text equals whole text, breaks no character, and ends exactly at a stop string."""

import itertools
import random
import time
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quintet.sampling_params import SamplingParams
from quintet.tokenizers.detokenizer import Detokenizer, WindowDecoder
from quintet.tokenizers.stop_strings import StopStrings
from quintet.tokenizers.tokenizer import Tokenizer
from tests.helpers.checkpoints import tokenizers as builders

HOSTILE = [
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin",
    "日本語テキスト 你好世界 한국어",
    "שלום \u202eעולם\u202c مرحبا",
    "e\u0301\u0302\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤a̴̵l̨g̕o",
    "nul\x00nul \x01\x7f\x80\xff",
    "genuine \ufffd replacement \ufffd\ufffd",
    "  leading  spaces\n\n\ttabs ",
    "▁metaspace▁ <0x41> Ġbyte Ċ",
    "\U0010ffff\ue000\ufeff\u2028",
    "<s>special</s> <|end|><tool>",
    " ",
    "",
]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40))
bounded = settings(derandomize=True, max_examples=60, deadline=None)
KINDS = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory):
    return {kind: getattr(builders, kind)(tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(params=["byte_level", "byte_fallback"])
def tokenizer(request, all_kinds):
    return all_kinds[request.param]


def stream(tokenizer, ids, params=None, prompt=(), chunks=None):
    """The deltas of ids that come one by one, or in chunks of these sizes."""
    detokenizer = Detokenizer(tokenizer, params or SamplingParams(), prompt)
    deltas, at = [], 0
    for size in chunks or itertools.repeat(1):
        if at >= len(ids) or detokenizer.stop is not None:
            break
        deltas.append(detokenizer.add(ids[at : at + size]))
        at += size
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return deltas


class Words:
    """A tokenizer of whole words, of whose pieces nothing is known; 2 and 3 are the halves of a letter."""

    def decode(self, ids: list[int], skip_special: bool) -> str:
        said = "".join({0: "once", 1: " upon", 2: "<", 3: ">", 4: ""}[each] for each in ids)
        return said.replace("<>", "é").replace("<", "\ufffd").replace(">", "\ufffd")


def test_a_word_of_an_unknown_decoder_comes_out_with_its_token() -> None:
    words: Any = Words()
    decoder = WindowDecoder(words, frozenset(), [0])
    assert [decoder.step(each) for each in (1, 2, 3, 4, 0, 1)] == [" upon", "", "é", "", "once", " upon"]
    assert decoder.finish() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_joined_equal_the_decoded_text(all_kinds, kind):
    tokenizer = all_kinds[kind]

    @bounded
    @given(texts, st.booleans())
    def check(text, skip):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        deltas = stream(tokenizer, ids, SamplingParams(skip_special_tokens=skip))
        assert "".join(deltas) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in delta for delta in deltas)

    check()


def test_any_bytes_decode_as_the_tokenizer_decodes_them(all_kinds):
    tokenizer = all_kinds["byte_level"]

    @bounded
    @given(st.lists(st.integers(0, len(tokenizer) + 3), max_size=40), st.booleans())
    def check(ids, skip):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, SamplingParams(skip_special_tokens=skip))) == whole

    check()


def test_invalid_byte_tokens_show_one_replacement_each_and_spare_their_neighbours(all_kinds):
    tokenizer = all_kinds["byte_fallback"]

    def ids_of(*values):
        return [tokenizer.token_id(f"<0x{value:02X}>") for value in values]

    invalid = ids_of(0xFF, 0xC3, 0x28, 0x80)
    assert "".join(stream(tokenizer, invalid)) == tokenizer.decode(ids_of(0xFF, 0xC3)) + "(" + "\ufffd"
    for run in (ids_of(0xE4, 0xBD), ids_of(0x80, 0x80, 0xF0, 0x9F)):  # nothing valid: as tokenizers has it
        assert "".join(stream(tokenizer, run)) == tokenizer.decode(run) == "\ufffd" * len(run)
    assert stream(tokenizer, ids_of(*"é👋".encode(), 0xE4)) == ["", "é", "", "", "", "👋", "", "\ufffd"]

    @bounded
    @given(st.lists(st.integers(0, 255), max_size=30))
    def check(values):
        deltas = stream(tokenizer, ids_of(*values))
        assert "".join(deltas) == bytes(values).decode(errors="surrogateescape").translate(
            {0xDC00 + byte: "\ufffd" for byte in range(128, 256)}
        ).removeprefix(" ")

    check()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_the_output_continues_the_prompt(all_kinds, kind):
    tokenizer = all_kinds[kind]
    for text in [*HOSTILE, "Hello world"]:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for cut in range(len(ids) + 1):
            before = "".join(stream(tokenizer, ids[:cut])[:-1])  # without what finish() gives up
            assert before + "".join(stream(tokenizer, ids[cut:], prompt=ids[:cut])) == whole


def test_a_prompt_of_special_tokens_alone_is_the_start_of_the_text(all_kinds):
    tokenizer = all_kinds["byte_fallback"]
    ids = tokenizer.encode("Hello")
    assert "".join(stream(tokenizer, ids[1:], prompt=ids[:1])) == "Hello"
    params = SamplingParams(skip_special_tokens=False)
    assert "".join(stream(tokenizer, ids[1:], params, prompt=ids[:1])) == " Hello"


def test_a_hostile_stream_costs_the_same_for_each_token_and_holds_three_bytes(tokenizer):
    name = "<0x80>" if tokenizer.token_id("<0x80>") is not None else "Ģ"
    token_id = tokenizer.token_id(name)
    assert tokenizer.token_bytes(token_id) == b"\x80"
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    started = time.thread_time()
    for _ in range(20_000):
        detokenizer.add([token_id])
        assert len(detokenizer._decoder._pending) <= 3
    assert time.thread_time() - started < 5  # quadratic would take minutes
    assert len(detokenizer.text) == 20_000


def test_a_window_decoder_holds_back_a_bounded_number_of_tokens(all_kinds):
    tokenizer = all_kinds["word_piece"]
    ids = tokenizer.encode("the quick brown fox") * 100
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    for token_id in ids:
        detokenizer.add([token_id])
        assert len(detokenizer._decoder._ids) <= 16
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)


# ------------------------------------------------------------------------------------------------------- stop strings


@pytest.fixture(scope="module")
def letters():
    """Every text over "ab" of one to three letters is a token."""
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product("ab", repeat=size)]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer.from_transformers(PreTrainedTokenizerFast(tokenizer_object=backend))


def splits(text, longest=3):
    """All ways to write a text as pieces."""
    if not text:
        yield []
    for size in range(1, min(longest, len(text)) + 1):
        for rest in splits(text[size:], longest):
            yield [text[:size], *rest]


def naive(pieces, stops, include, min_tokens):
    """(text, stop, tokens) by trying every end of the text, one character after the other."""
    text = ""
    for num, piece in enumerate(pieces, 1):
        for character in piece:
            text += character
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and num > min_tokens:
                stop = max(ended, key=len)
                return text if include else text[: -len(stop)], stop, num
    return text, None, len(pieces)


STOPS = [["a"], ["ab"], ["aab", "b"], ["abab"], ["ba", "aba"], ["aa", "aaa"], ["bb", "abba", "bab"], ["aabb", "abb"]]


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_stops_as_a_naive_search_over_every_split(letters, stops, include, min_tokens):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    for text in ("aabbab", "ababab", "abbaba"):
        for pieces in splits(text):
            wanted = naive(pieces, stops, include, min_tokens)
            ids = [letters.token_id(piece) for piece in pieces]
            detokenizer = Detokenizer(letters, params)
            deltas = [detokenizer.add([token_id]) for token_id in ids]
            deltas.append(detokenizer.finish())
            assert ("".join(deltas), detokenizer.stop, detokenizer.num_tokens) == wanted, pieces
            at_once = Detokenizer(letters, params)
            assert at_once.add(ids) + at_once.finish() == wanted[0]
            assert at_once.num_tokens == wanted[2]


def test_only_what_may_become_a_stop_string_is_held_back(letters):
    detokenizer = Detokenizer(letters, SamplingParams(stop=["abb"]))
    assert [detokenizer.add([letters.token_id(piece)]) for piece in ("a", "a", "b", "a", "bb", "a")] == [
        *("", "a", "", "ab", "", "")
    ]
    assert detokenizer.stop == "abb"
    assert detokenizer.num_tokens == 5  # the last one came too late
    assert detokenizer.finish() == ""


def test_what_was_held_back_comes_at_the_end(letters):
    assert stream(letters, [letters.token_id("a"), letters.token_id("b")], SamplingParams(stop=["abb"])) == [
        "",
        "",
        "ab",
    ]


def test_stop_strings_across_characters_of_several_tokens(tokenizer):
    ids = tokenizer.encode("Hello 👋🏽 world", add_special_tokens=False)
    for stop in ("👋🏽", "🏽 w", "o 👋", "Hello 👋🏽 world", "d"):
        params = SamplingParams(stop=stop)
        assert "".join(stream(tokenizer, ids, params)) == "Hello 👋🏽 world".split(stop)[0]


def test_a_stop_token_shows_no_text(tokenizer):
    ids = tokenizer.encode("Hello fox", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    shown = detokenizer.add(ids, hide_last=True) + detokenizer.finish()
    assert shown == "".join(stream(tokenizer, ids[:-1]))
    assert detokenizer.num_tokens == len(ids)


def test_the_automaton_against_find_on_random_texts():
    draw = random.Random(0)
    for _ in range(300):
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 4))]
        text = "".join(draw.choices("abc", k=30))
        automaton = StopStrings(tuple(stops))
        state, end = automaton.scan(0, text)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert end == (min(ends) if ends else len(text))
        assert (automaton.found[state] is not None) == bool(ends)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_stand_close_where_that_is_asked_for(kind, all_kinds):
    """vLLM's spaces_between_special_tokens: of added tokens one after the other, where they show at all."""
    tokenizer = all_kinds[kind]
    added = [i for text, i in sorted(tokenizer.added.items()) if text.strip() and not text.startswith(" ")][:2]
    word = tokenizer.encode("tool", add_special_tokens=False)
    ids = [*added, *word, *added, *added]
    names = {i: text for text, i in tokenizer.added.items()}
    close = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    text = "".join(stream(tokenizer, ids, close))
    spaced = "".join(stream(tokenizer, ids, SamplingParams(skip_special_tokens=False)))
    assert "".join(names[i] for i in [*added, *added]) in text
    assert text.replace(" ", "") == spaced.replace(" ", "")
    assert (text != spaced) == (kind == "word_piece")  # whose decoder writes a space before every token
    hidden = SamplingParams(spaces_between_special_tokens=False)
    assert stream(tokenizer, ids, hidden) == stream(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_kept_stay_and_others_go(all_kinds, kind):
    tokenizer = all_kinds[kind]
    kept, other = sorted(tokenizer.special_ids)[:2]
    ids = [kept, *tokenizer.encode("ab", add_special_tokens=False), other, kept]
    text = "".join(stream(tokenizer, ids, SamplingParams(keep_special_tokens=[kept])))
    names = [tokenizer.backend.id_to_token(each) for each in (kept, other)]
    assert text.count(names[0]) == 2 and names[1] not in text and "ab" in text
