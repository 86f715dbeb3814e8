"""The transcriber on engines: one encoding for each window, and Whisper's own weights where they are at hand."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet import AsyncLLM
from quintet.api.speech import AsyncSpeechEngine, make_transcriber
from quintet.media.audio.decode import AudioDecoder
from quintet.media.audio.resample import Samples
from quintet.media.audio.silence import find_speech
from quintet.outputs import CompletionOutput
from quintet.sampling_params import SamplingParams
from quintet.transcription.formats import to_text
from quintet.transcription.transcriber import Transcript, TranscriptionOptions
from tests.helpers.checkpoints.whisper_served import said, small_whisper

SPOKEN = (
    "Good morning everybody. This is a long recording with several sentences. We talk about the weather today. It "
    "rains in the north, and the sun shines in the south. Tomorrow it will be dry again, with a few clouds over the "
    "sea. Farmers are happy about the rain, because the fields have been dry for many weeks. At the end of the week "
    "the temperatures will rise to thirty degrees. Please drink enough water, and stay in the shade at noon. Thank you "
    "for listening, and goodbye."
)


class Counted:
    """Notes which samples were asked about."""

    def __init__(self, engine: AsyncSpeechEngine) -> None:
        self._engine = engine
        self.places: list[tuple[int, int]] = []

    async def generate(self, samples: Samples, prompt: Sequence[int], params: SamplingParams) -> CompletionOutput:
        self.places.append((samples.__array_interface__["data"][0], len(samples)))
        return await self._engine.generate(samples, prompt, params)


def test_a_window_is_encoded_once_however_often_it_is_asked() -> None:
    """A random model's text is unlikely: each window is asked for at all temperatures."""
    llm = AsyncLLM(str(small_whisper()), device="cpu", dtype="float32", max_model_len=64)
    try:
        transcriber = make_transcriber(llm, TranscriptionOptions(finder=find_speech, sampling={"max_tokens": 8}))
        engine: Any = transcriber._engine
        counted = transcriber._engine = Counted(engine)
        audio = np.concatenate([said(4, 150), np.zeros(35 * 16_000, np.float32), said(25, 210)])
        asyncio.run(transcriber.transcript(audio))
        stats = llm._client.engine.stats()
    finally:
        llm.shutdown()
    assert len(counted.places) >= 7 * len(set(counted.places)) > 7
    assert stats.encoder.num_encoder_passes == len(set(counted.places))


def _spoken(text: str, voice: str, folder: Path) -> Samples:
    file = folder / f"{voice}.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-w", str(file), text], check=True)
    with file.open("rb") as source:
        return AudioDecoder().decode_here(source).samples


def _heard(name: str, audio: Samples, **options: Any) -> Transcript:
    folder = Path(os.environ.get("REAL_MODELS", "")) / name
    if not folder.is_dir() or "REAL_MODELS" not in os.environ:
        pytest.skip(f"set REAL_MODELS to a folder that holds {name}")
    llm = AsyncLLM(str(folder), device="cpu", dtype="float32")
    try:
        return asyncio.run(make_transcriber(llm, TranscriptionOptions(**options)).transcript(audio))
    finally:
        llm.shutdown()


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower().replace("30", "thirty"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
@pytest.mark.parametrize(
    ("name", "previous"), [("whisper-base", False), ("whisper-base", True), ("whisper-tiny.en", False)]
)
def test_real_weights_hear_speech_in_its_place(name: str, previous: bool, tmp_path: Path) -> None:
    spoken = _spoken(SPOKEN, "en", tmp_path)
    audio = np.concatenate([np.zeros(40 * 16_000, np.float32), spoken, np.zeros(40 * 16_000, np.float32)])
    found = _heard(name, audio, condition_on_previous_text=previous)
    end = 40 + len(spoken) / 16_000
    assert found.language == "en" and found.segments[0].start == pytest.approx(40, abs=0.5)
    assert found.segments[-1].end == pytest.approx(end, abs=1.5)
    wanted, heard = _words(SPOKEN), _words(to_text(found.segments))
    common = sum(word in heard for word in wanted) / len(wanted)
    assert common > 0.9 and abs(len(heard) - len(wanted)) < 0.15 * len(wanted), to_text(found.segments)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng")
def test_real_weights_hear_the_language_and_no_text_in_noise(tmp_path: Path) -> None:
    audio = _spoken("Guten Morgen, meine Damen und Herren. Heute ist ein schöner Tag.", "de", tmp_path)
    assert _heard("whisper-base", audio).language == "de"
    noise = (0.001 * np.random.default_rng(1).standard_normal(40 * 16_000)).astype(np.float32)
    assert _heard("whisper-base", noise).segments == []
