"""Words of published Whisper checkpoints: places within 20 ms of transformers'. Set REAL_MODELS to their folder."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutomaticSpeechRecognitionPipeline,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from quintet import AsyncLLM
from quintet.api.speech import make_transcriber
from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.silence import Span
from quintet.model_loader.ctranslate2 import config_of, generation_config_of, state_dict_of
from quintet.transcription.segments import Thresholds
from quintet.transcription.transcriber import Transcript, TranscriptionOptions
from tests.e2e.speech.test_real_whisper import TEXTS, Samples, spoken

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(7200)]


def pipeline(folder: Path) -> AutomaticSpeechRecognitionPipeline:
    """Returns transformers' pipeline in float32."""
    model = WhisperForConditionalGeneration(WhisperConfig(**{**config_of(folder), "dtype": None})).float().eval()
    model.load_state_dict({k: v.float() for k, v in state_dict_of(folder).items()}, strict=False)
    model.generation_config = GenerationConfig(**generation_config_of(folder))
    model.set_attn_implementation("eager")
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    if model.generation_config.is_multilingual:  # with ids of languages, transformers detects one in other models too
        names = [f"<|{each[:2]}|>" for each in TEXTS]
        model.generation_config.lang_to_id = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    extract = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, return_attention_mask=True)
    return AutomaticSpeechRecognitionPipeline(model=model, tokenizer=tokenizer, feature_extractor=extract)


async def heard(llm: AsyncLLM, samples: Samples, language: str) -> Transcript:
    """Returns the transcript of the samples as one window, at temperature 0."""
    options = TranscriptionOptions(
        language=language, word_timestamps=True, thresholds=Thresholds(None, None, None, (0.0,)),
        finder=lambda given: [Span(0, len(given))],
    )  # fmt: skip
    return await make_transcriber(llm, options).transcript(samples)


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_words_equal_transformers(name: str) -> None:
    folder = Path(os.environ.get("REAL_MODELS", "")) / name
    if not (folder / "model.bin").is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {name}")
    voices = [each for each in TEXTS if each.startswith("en") or not name.endswith(".en")]
    reference, differ = pipeline(folder), []
    llm = AsyncLLM(str(folder), device="cpu", dtype="float32")
    try:
        for voice in voices:
            samples, language = spoken(voice), voice[:2]
            known: Any = {} if name.endswith(".en") else {"language": language, "task": "transcribe"}
            theirs = reference(
                {"raw": samples.copy(), "sampling_rate": SAMPLE_RATE}, return_timestamps="word",
                generate_kwargs={**known, "num_beams": 1},
            )["chunks"]  # fmt: skip
            found = asyncio.run(heard(llm, samples, language))
            ours = [word for segment in found.segments for word in segment.words]
            assert len(ours) > 4
            if [each.text for each in ours] != [each["text"] for each in theirs]:
                differ.append((voice, "words", [each.text for each in ours], [each["text"] for each in theirs]))
                continue
            places = [(each.start, each.end, *each_of["timestamp"]) for each, each_of in zip(ours, theirs, strict=True)]
            if (most := max(max(abs(a - c), abs(b - d)) for a, b, c, d in places)) > 0.0201:
                differ.append((voice, most, places, ours))
            print(voice, len(ours), "words, most apart:", round(most, 3), "last ends", places[-1], flush=True)
    finally:
        llm.shutdown()
    assert not differ
