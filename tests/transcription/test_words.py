"""Words of tokens, with punctuation, as transformers' tokenizer of Whisper makes them."""

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from quintet.transcription.words import Word, words_of

EOT, TIME = 256, 300  # tokens below are bytes


def _bytes() -> Backend:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


BACKEND = _bytes()


class Theirs:
    """What transformers' function asks of a tokenizer."""

    eos_token_id = EOT
    language = "english"

    def decode(self, tokens: list[int], **options: Any) -> str:
        return BACKEND.decode(tokens)


TEXTS = [
    " Hello there.", " Well, well... (he said), \"no\" - \"yes\"!", "Hello", "", " ", " - -", " ¿Qué? ¡Nada!",
    " 5 % or $3.50", " naïve café – 日本語、です。", "日本語。です", " \ufffd broken",
    " don't stop-gap [it]", "...", " \" 'a' \" b",
]  # fmt: skip


@pytest.mark.parametrize(("language", "name"), [("en", "english"), ("ja", "japanese"), ("de", "german"), (None, None)])
@pytest.mark.parametrize("text", TEXTS)
def test_words_equal_transformers(text: str, language: str | None, name: str | None) -> None:
    tokens = BACKEND.encode(text).ids
    want, _, places = _combine_tokens_into_words(Theirs(), tokens, name)
    bounds = [float(at) for at in range(len(tokens) + 1)]
    found = words_of(tokens, bounds, language, EOT, lambda ids: BACKEND.decode(list(ids)))
    assert [each.text for each in found] == want
    assert [(each.start, each.end) for each in found] == [(float(at[0]), float(at[-1] + 1)) for at in places]


def test_words_end_at_timestamps() -> None:
    """A word's first token begins where the token before it ends, be that a timestamp or text."""
    [a, space, b, stop] = BACKEND.encode("a b.").ids
    tokens = [TIME, a, TIME + 9, TIME + 10, space, b, stop, TIME + 20, EOT]
    bounds = [0.0, 0.1, 0.4, 0.5, 0.55, 0.6, 0.9, 1.0, 1.1, 1.2]
    found = words_of(tokens, bounds, "en", EOT, lambda ids: BACKEND.decode(list(ids)))
    assert found == [Word("a", 0.1, 0.4), Word(" b.", 0.55, 1.0)]
    assert words_of([TIME, EOT], [0.0, 0.1, 0.2], "en", EOT, lambda ids: "") == []


def test_a_moved_word_stays_within_its_window() -> None:
    assert Word("a", 0.5, 0.7).moved(30.004, 30.0, 31.0) == Word("a", 30.5, 30.7)
    assert Word("a", 0.5, 1.7).moved(30.0, 30.0, 31.0) == Word("a", 30.5, 31.0)
    assert Word("a", 1.5, 1.7).moved(30.0, 30.0, 31.0) == Word("a", 31.0, 31.0)
