"""An engine of scripts: what each window is answered with is known beforehand, and what was asked is kept."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import Samples
from quintet.outputs import CompletionOutput, Logprob
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan
from quintet.transcription.model import WhisperModel
from quintet.transcription.tokens import WhisperTokens

# text is 0 .. 99, then special tokens, then timestamps from 121 on
TOKENS = WhisperTokens(100, 101, 102, 103, 104, 120, 105, {"en": 110, "de": 111, "fr": 112})
ENGLISH = WhisperTokens(100, 101, 102, 103, 104, 120, 105, {})


def at(seconds: float) -> int:
    """The token of a time."""
    return TOKENS.timestamp_begin + round(seconds / 0.02)


def model(tokens: WhisperTokens = TOKENS, max_positions: int = 448) -> WhisperModel:
    """Token 7 is the word " w7"; so is the reverse."""
    return WhisperModel(
        tokens, lambda text: [int(word[1:]) for word in text.split()], lambda ids: "".join(f" w{each}" for each in ids),
        max_positions,
    )  # fmt: skip


def voice(seconds: float) -> Samples:
    """Syllables of 200 ms with dips between."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (0.1 * (0.55 - 0.45 * np.cos(2 * np.pi * 5 * t)) * np.sin(2 * np.pi * 170 * t)).astype(np.float32)


def silence(seconds: float) -> Samples:
    return np.zeros(round(seconds * SAMPLE_RATE), np.float32)


class Asked(NamedTuple):
    """One request of the transcriber."""

    start: float  # of its window in the audio, in seconds
    seconds: float
    prompt: list[int]
    params: SamplingParams

    @property
    def is_probe(self) -> bool:
        """Whether it asks for language and silence alone."""
        return self.params.max_tokens == 1


Script = Callable[[Asked], tuple[Sequence[int], float]]  # the tokens, and the log-probability of each


def says(*tokens: int, logprob: float = -0.2) -> Script:
    return lambda asked: (tokens, logprob)


@dataclass
class SimulatedEngine:
    """Answers with a script. `hang`: requests of which that says yes wait for `go_on`."""

    audio: Samples
    script: Script
    languages: dict[str, float] = field(default_factory=lambda: {"en": -0.1, "de": -3.0, "fr": -4.0})
    no_speech: float = -5.0  # log-probability
    hang: Callable[[Asked], bool] = lambda asked: False
    asked: list[Asked] = field(default_factory=list)
    aligned: list[tuple[list[int], AlignmentSpan]] = field(default_factory=list)
    running: int = 0
    most: int = 0  # requests that ran at once
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.go_on, self.hangs = asyncio.Event(), asyncio.Event()

    @property
    def decoded(self) -> list[Asked]:
        """The requests for text."""
        return [each for each in self.asked if not each.is_probe]

    async def align(self, samples: Samples, tokens: Sequence[int], span: AlignmentSpan) -> NDArray[np.float32]:
        """The tokens divide the audio evenly."""
        self.aligned.append((list(tokens), span))
        count = len(tokens) - span.first
        owners = np.arange(span.rows) * count // span.rows
        return (owners[None] == np.arange(count)[:, None]).astype(np.float32)

    async def generate(self, samples: Samples, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        offset = (samples.__array_interface__["data"][0] - self.audio.__array_interface__["data"][0]) // 4
        asked = Asked(offset / SAMPLE_RATE, len(samples) / SAMPLE_RATE, list(prompt), params)
        self.asked.append(asked)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if self.hang(asked):
                self.hangs.set()
                await self.go_on.wait()
            return self._probe() if asked.is_probe else self._text(asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _probe(self) -> CompletionOutput:
        found = {TOKENS.languages[code]: Logprob(value) for code, value in self.languages.items()}
        found[105] = Logprob(self.no_speech)
        return CompletionOutput(0, "", [at(0)], logprobs=[{**found, at(0): Logprob(-9.0)}], finish_reason="length")

    def _text(self, asked: Asked) -> CompletionOutput:
        tokens, logprob = self.script(asked)
        return CompletionOutput(
            0, "", list(tokens), logprobs=[{each: Logprob(logprob)} for each in tokens], finish_reason="stop"
        )
