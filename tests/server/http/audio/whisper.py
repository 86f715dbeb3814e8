"""A fake backend whose model is Whisper, with a small vocabulary of its own, and an app over it."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import httpx
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.decode import Audio
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.audio.resample import Samples
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.tokenizers.tokenizer import Tokenizer
from quintet.transcription.tokens import WhisperTokens
from tests.media.audio.test_decode import wav
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST
from tests.transcription.simulated import silence as silence
from tests.transcription.simulated import voice as voice

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
[PATH, TRANSLATIONS] = PATHS
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip


def whisper_tokenizer(languages: bool = True) -> Tokenizer:
    """A token for each byte, then Whisper's: special ones, and times."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = [each for each in SPECIAL if languages or each not in ("<|en|>", "<|de|>")]
    made.add_special_tokens([AddedToken(each, special=True) for each in names])
    made.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>") for step in range(1501)])
    return Tokenizer(made, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, None, lambda: None)


@functools.cache
def tokenizer() -> Tokenizer:
    return whisper_tokenizer()


def tokens() -> WhisperTokens:
    return WhisperTokens.of_vocabulary(tokenizer().added, multilingual=True)


def said(text: str, start: float = 0.0, end: float = 2.0) -> list[int]:
    """The tokens of a segment."""
    begin = tokens().timestamp_begin
    return [begin + round(start * 50), *tokenizer().encode(text, add_special_tokens=False), begin + round(end * 50)]


def whisper_backend(*segments: tuple[str, float, float], **options: Any) -> FakeBackend:
    """Each window is answered with these segments."""
    reply = [token for each in segments or [(" Hello there.", 0.0, 2.0)] for token in said(*each)]
    fake = FakeBackend(tokenizer(), reply=reply, **{"max_model_len": 448, "burst": 8, **options})
    encoder = SpeechInput(80, 1500, (tokens().sot,))
    fake.model_info = replace(fake.model_info, family="whisper", encoder=encoder)
    fake._admission.limits = replace(fake._admission.limits, encoder=encoder)
    return fake


@dataclass
class GivenAudio:
    """A decoder that does not look at files; what it gives is known."""

    samples: Samples
    decoded: list[bytes] = field(default_factory=list)

    async def decode(self, source: BinaryIO) -> Audio:
        self.decoded.append(source.read())
        return Audio(self.samples, SAMPLE_RATE, 1)


def speech(*seconds: float, pause: float = 35.0) -> Samples:
    """Spans of speech, with pauses between that no window bridges."""
    parts = [part for each in seconds for part in (voice(each), silence(pause))]
    return np.concatenate(parts[:-1])


def client(backend: FakeBackend, samples: Samples | None = None, **settings: Any) -> httpx.AsyncClient:
    """With samples, files are not decoded: each is these samples."""
    service = AppState(backend, ServerConfig(**settings))
    if samples is not None:
        service.audio = GivenAudio(samples)  # type: ignore[assignment]
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url=HOST)


def file_of(samples: Samples) -> dict[str, tuple[str, bytes, str]]:
    """The part of a form."""
    return {"file": ("a.wav", wav(samples, SAMPLE_RATE), "audio/wav")}


ANY = {"file": ("a.wav", b"any", "audio/wav")}
