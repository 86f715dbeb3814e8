"""Words of a transcript: their tokens, punctuation, and times. Source: openai-whisper's tokenizer.py and timing.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from string import punctuation
from typing import NamedTuple

SPACELESS = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages that put no spaces between words
_BEFORE = "\"'“¡¿([{-"  # punctuation that belongs to the word behind it
_BEHIND = "\"'.。,，!！?？:：”)]}、"  # and to the word before it
_DAMAGED = "\ufffd"  # what a piece of a character decodes to
_DIGITS = 2  # of seconds: rows have 20 ms


@dataclass(frozen=True)
class Word:
    """A word with its punctuation, and its place in the audio, in seconds."""

    text: str  # with the space before it
    start: float
    end: float

    def moved(self, seconds: float, first: float, last: float) -> "Word":
        """Returns the word so many seconds later, within first .. last."""
        start = min(max(self.start + seconds, first), last)
        end = min(max(self.end + seconds, start), last)
        return replace(self, start=round(start, _DIGITS), end=round(end, _DIGITS))


class _Piece(NamedTuple):
    """Text of tokens start .. stop - 1."""

    text: str
    start: int
    stop: int


def words_of(
    tokens: Sequence[int], bounds: Sequence[float], language: str | None, eot: int,
    decode: Callable[[Sequence[int]], str],
) -> list[Word]:  # fmt: skip
    """Returns the words of tokens, of which timestamps and other special ones are `eot` and above.

    `bounds`: seconds at which the first token begins, and at which each token ends and the next begins.
    """
    marks = [-1, *(at for at, token in enumerate(tokens) if token >= eot), len(tokens)]
    found = []
    for start, stop in ((mark + 1, stop) for mark, stop in pairwise(marks) if stop > mark + 1):
        for each in _pieces(tokens[start:stop], language, decode):
            begin, end = bounds[start + each.start], bounds[start + each.stop]
            found.append(Word(each.text, round(begin, _DIGITS), round(end, _DIGITS)))
    return found


def _pieces(tokens: Sequence[int], language: str | None, decode: Callable[[Sequence[int]], str]) -> list[_Piece]:
    """Returns the words of tokens of text."""
    found = _characters(tokens, decode)
    return _with_punctuation(found if language in SPACELESS else _between_spaces(found))


def _characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[_Piece]:
    """Returns the shortest runs of tokens that are whole characters."""
    whole, found, start, length = decode(tokens), list[_Piece](), 0, 0
    for stop in range(1, len(tokens) + 1):
        text = decode(tokens[start:stop])
        at = text.find(_DAMAGED)
        if at < 0 or length + at >= len(whole) or whole[length + at] == _DAMAGED:
            found.append(_Piece(text, start, stop))
            start, length = stop, length + len(text)
    return found


def _between_spaces(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Joins pieces to words, which begin with a space; punctuation stands alone."""
    found: list[_Piece] = []
    for each in pieces:
        if not found or each.text.startswith(" ") or each.text.strip() in punctuation:
            found.append(each)
        else:
            found[-1] = _joined(found[-1], each)
    return found


def _with_punctuation(words: Sequence[_Piece]) -> list[_Piece]:
    """Joins punctuation to the words that it belongs to."""
    behind: list[_Piece] = []  # from the last word on
    for each in reversed(words):
        if behind and each.text.startswith(" ") and each.text.strip() in _BEFORE:
            behind[-1] = _joined(each, behind[-1])
        else:
            behind.append(each)
    found: list[_Piece] = []
    for each in reversed(behind):
        if found and not found[-1].text.endswith(" ") and each.text in _BEHIND:
            found[-1] = _joined(found[-1], each)
        else:
            found.append(each)
    return [each for each in found if each.text]


def _joined(first: _Piece, second: _Piece) -> _Piece:
    return _Piece(first.text + second.text, first.start, second.stop)
