"""Models of speech and the engine that runs them, as the transcriber sees them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quintet.media.audio.log_mel import CHUNK_SECONDS
from quintet.media.audio.resample import Samples
from quintet.media.lazy_numpy import np
from quintet.outputs import CompletionOutput
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan
from quintet.transcription.tokens import WhisperTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_POSITIONS = 448  # of Whisper's decoders: prompt and output together
TOKENS_PER_SECOND = 13  # of Moonshine at most, in languages whose scripts it writes byte by byte; English: 6.5
ENGLISH_ONLY = 51864  # vocabulary of models of English alone; multilingual ones have more. Source: openai-whisper


class SpeechEngine(Protocol):
    """Runs requests of a model of speech. Requests of equal samples are encoded once."""

    async def generate(self, samples: Samples, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        """Returns the finished output of the decoder's tokens behind `prompt`, for samples [N] at 16 kHz.

        Cancelling ends the request. An engine that fails raises what its callers expect of it.
        """
        ...

    async def align(self, samples: Samples, tokens: Sequence[int], span: AlignmentSpan) -> NDArray[np.float32]:
        """Returns what the model's alignment heads attend to: weights [T, span.rows] of the decoder's tokens from
        span.first on. As generate() in all else."""
        ...


@dataclass(frozen=True)
class WhisperModel:
    """Vocabulary and limits of a Whisper model."""

    tokens: WhisperTokens
    encode: Callable[[str], list[int]]  # text to tokens, without special ones
    decode: Callable[[Sequence[int]], str]  # the reverse
    max_positions: int = MAX_POSITIONS
    seconds: float = CHUNK_SECONDS  # of audio that one request takes
    aligns: bool = True  # whether SpeechEngine.align is there

    @classmethod
    def of_tokenizer(
        cls, ids: Mapping[str, int], encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str],
        vocab_size: int, max_positions: int = MAX_POSITIONS, seconds: float = CHUNK_SECONDS,
    ) -> WhisperModel:  # fmt: skip
        """`ids`: special tokens by their text; `vocab_size`: the model's. ValueError if a token is missing: the
        tokenizer is not Whisper's."""
        tokens = WhisperTokens.of_vocabulary(ids, multilingual=vocab_size != ENGLISH_ONLY)
        return cls(tokens, encode, decode, min(max_positions, MAX_POSITIONS), seconds)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without timestamps and other special ones."""
        return self.decode([each for each in tokens if each < self.tokens.eot])

    def check_language(self, language: str | None, task: str) -> None:
        """ValueError if the model does not have the language (None: it is detected) or the task."""
        if language is not None or not self.tokens.languages:
            self.tokens.prompt(language, task)


@dataclass(frozen=True)
class PlainModel:
    """A model that gives text alone, such as Moonshine: no times, languages or tasks, and no text before the audio."""

    prompt: tuple[int, ...]  # of every request
    decode: Callable[[Sequence[int]], str]  # tokens to text, without special ones
    max_positions: int  # prompt and output together
    longest: float = CHUNK_SECONDS  # seconds of audio that one request takes

    @property
    def seconds(self) -> float:
        """Length of a window, whose text fits; no cut looks back over more than 5 s."""
        return min(self.longest, max(6.0, self.max_tokens(self.longest) / TOKENS_PER_SECOND))

    def max_tokens(self, seconds: float) -> int:
        """Returns the limit of a window's output: a text that never ends repeats itself."""
        return min(self.max_positions - len(self.prompt), math.ceil(seconds * TOKENS_PER_SECOND) + 2)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, behind a space where its script has spaces."""
        text = self.decode(tokens).strip()
        wide = unicodedata.east_asian_width(text[:1] or " ") in "WF" and "HANGUL" not in unicodedata.name(text[0], "")
        return text if wide else f" {text}"


SpeechModel = WhisperModel | PlainModel


class UnsupportedOption(ValueError):
    """Raised for an option of a transcription that a model does not have."""

    def __init__(self, option: str, why: str) -> None:
        super().__init__(why)
        self.option = option  # its name in TranscriptionOptions
