"""Segments of a transcript: parsed from tokens with timestamps, judged, and joined over the pieces of long audio."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quintet.media.audio.whisper_vocabulary import SECONDS_PER_TIMESTAMP
from quintet.transcription.tokens import WhisperTokens
from quintet.transcription.words import Word

_DIGITS = 6  # of seconds: sums of 20 ms stay as they are written


@dataclass(frozen=True)
class Segment:
    """A piece of text with its place in the audio, in seconds from the audio's start."""

    start: float
    end: float
    tokens: tuple[int, ...]  # with timestamps
    text: str = ""
    id: int = 0
    seek: int = 0  # of the window that it was heard in, in frames of 10 ms
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()  # where they were asked for


class Window(NamedTuple):
    """Segments of one window of audio."""

    segments: list[Segment]
    complete: int  # segments before the last pair of timestamps, or all
    next_start: float  # seconds in the audio from which on nothing was transcribed completely


def parse_window(tokens: Sequence[int], names: WhisperTokens, start: float, seconds: float) -> Window:
    """Returns the segments of the tokens (without the prompt) that were generated for `seconds` of audio from `start`
    on; their texts are empty.

    As in openai-whisper's transcribe.py, a pair of timestamps separates two segments. Text behind the last pair is cut
    at the window's end: it is one more segment, up to there, behind the `complete` ones. Where the tokens end with a
    pair and `next_start` is before the window's end, the model has ended early, and the rest may hold more speech: it
    has to be transcribed from `next_start` on.
    """
    tokens = tokens[: tokens.index(names.eot)] if names.eot in tokens else tokens
    begin, seek = names.timestamp_begin, round(start * 100)
    marks = [token >= begin for token in tokens]
    cuts = [at + 1 for at in range(len(tokens) - 1) if marks[at] and marks[at + 1]]
    closed = marks[-2:] == [False, True]

    def segment(piece: Sequence[int], first: float, last: float) -> Segment:
        return Segment(round(start + first, _DIGITS), round(start + last, _DIGITS), tuple(piece), seek=seek)

    def place(token: int) -> float:
        return (token - begin) * SECONDS_PER_TIMESTAMP

    if not cuts:
        last = next((token for token in reversed(tokens) if token >= begin), begin)
        found = [segment(tokens, 0.0, place(last) if last != begin else seconds)] if len(tokens) else []
        return Window(found, len(found), start + seconds)
    pieces = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)] if closed else cuts, strict=False)]
    found = [segment(each, place(max(each[0], begin)), place(max(each[-1], begin))) for each in pieces]
    if closed:
        return Window(found, len(found), start + seconds)
    rest, complete = tokens[cuts[-1] :], len(found)
    if any(not mark for mark in marks[cuts[-1] :]):
        found.append(segment(rest, place(rest[0]), max(seconds, place(rest[0]))))
    return Window(found, complete, round(start + place(tokens[cuts[-1] - 1]), _DIGITS))


class SegmentJoiner:
    """Joins the segments of windows that come in their order, and numbers them.

    A segment lies within its window, and begins where the one before it ends or later: Whisper may set timestamps
    beyond the sound that it was given. Segments without text are left out.
    """

    def __init__(self) -> None:
        self._count, self._latest = 0, 0.0

    def add(self, first: float, last: float, segments: Iterable[Segment]) -> list[Segment]:
        """Returns the segments of the next window, which lasts from `first` to `last` seconds of the audio."""
        found: list[Segment] = []
        for each in segments:
            start = min(max(each.start, first, self._latest), last)
            end = min(max(each.end, start), last)
            if each.text.strip():
                found.append(replace(each, id=self._count, start=round(start, _DIGITS), end=round(end, _DIGITS)))
                self._count, self._latest = self._count + 1, end
        return found


def join_windows(windows: Iterable[tuple[float, float, Sequence[Segment]]]) -> list[Segment]:
    """Returns the segments of all windows, each (start, end, segments) in seconds of the audio: see SegmentJoiner."""
    joiner = SegmentJoiner()
    return [each for first, last, segments in windows for each in joiner.add(first, last, segments)]


def compression_ratio(text: str) -> float:
    """Returns bytes of the text for each byte that zlib makes of it: text that repeats itself has a high one."""
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw))


def mean_logprob(logprobs: Sequence[float]) -> float:
    """Returns the mean of the log-probabilities of generated tokens, with that of <|endoftext|>; 0 for none."""
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


@dataclass(frozen=True)
class Thresholds:
    """Limits at which a window is transcribed again at a higher temperature, or is silence; openai-whisper's values."""

    compression_ratio: float | None = 2.4
    logprob: float | None = -1.0
    no_speech: float | None = 0.6
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

    def is_silent(self, no_speech_prob: float, avg_logprob: float) -> bool:
        """Returns whether the window holds no speech, whatever its text is."""
        unsure = self.logprob is None or avg_logprob <= self.logprob
        return self.no_speech is not None and no_speech_prob > self.no_speech and unsure

    def needs_fallback(self, ratio: float, avg_logprob: float, no_speech_prob: float) -> bool:
        """Returns whether the text repeats itself or is unlikely, and the window is not silent."""
        repeats = self.compression_ratio is not None and ratio > self.compression_ratio
        unlikely = self.logprob is not None and avg_logprob < self.logprob
        silent = self.no_speech is not None and no_speech_prob > self.no_speech and unlikely
        return (repeats or unlikely) and not silent
