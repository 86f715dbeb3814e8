"""Decoding rules of an encoder-decoder checkpoint, as its generation config has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.transcription.tokens import WhisperTokens

_NO_TIMESTAMPS = "no_timestamps_token_id"
_REMEDY = "correct generation_config.json, or fetch the model again"


@dataclass(frozen=True)
class DecodingRules:
    """Tokens that are never sampled, and how timestamps of transcripts follow one another."""

    suppress: tuple[int, ...]  # never sampled
    begin_suppress: tuple[int, ...]  # nor first
    tokens: WhisperTokens | None  # None: the generation config does not name them, so that there are no timestamps
    max_initial: int | None = None  # of the first timestamp, in steps of 20 ms; None: any

    @classmethod
    def of_generation_config(cls, entries: Mapping[str, Any], sot: int, eot: int, vocab_size: int) -> "DecodingRules":
        """Reads the entries. `sot` and `eot`: the first token of a prompt, and the one that ends a transcript, where
        the entries do not say so. ValueError names an entry that is no token of the vocabulary."""

        def ids(name: str) -> tuple[int, ...]:
            value = entries.get(name) or []
            if not isinstance(value, list) or not all(type(each) is int and -1 <= each < vocab_size for each in value):
                raise ValueError(f"{name} is no list of token ids below {vocab_size}; {_REMEDY}")
            return tuple(sorted({each for each in value if each >= 0}))  # -1: "those that are no speech"

        def number(name: str) -> int | None:
            value = entries.get(name)
            if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
                raise ValueError(f"{name} is {str(value)[:40]!r}, no number below {vocab_size}; {_REMEDY}")
            return value

        suppress, begin, no_timestamps = ids("suppress_tokens"), ids("begin_suppress_tokens"), number(_NO_TIMESTAMPS)
        suppress = tuple(sorted({*suppress, *_banned(entries, vocab_size)}))
        if no_timestamps is None:
            return cls(suppress, begin, None)
        start = number("decoder_start_token_id")
        tokens = WhisperTokens(
            eot=eot, sot=sot if start is None else start, translate=-1, transcribe=-1, start_of_prev=-1,
            no_timestamps=no_timestamps, no_speech=None, languages={},
        )  # fmt: skip
        return cls(suppress, begin, tokens, number("max_initial_timestamp_index"))

    def has_timestamps(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether what follows a prompt has timestamps: it starts a transcript, and does not exclude them."""
        tokens = self.tokens
        return tokens is not None and tokens.sot in prompt_ids and tokens.no_timestamps not in prompt_ids


def _banned(entries: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Returns the tokens of bad_words_ids that are words by themselves, such as Marian's padding. ValueError if the
    entry is no list of lists of tokens."""
    words = entries.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise ValueError(f"bad_words_ids is no list of lists of token ids; {_REMEDY}")
    single = [word[0] for word in words if len(word) == 1]
    if not all(type(each) is int and 0 <= each < vocab_size for each in single):
        raise ValueError(f"bad_words_ids has tokens that are not below {vocab_size}; {_REMEDY}")
    return single
