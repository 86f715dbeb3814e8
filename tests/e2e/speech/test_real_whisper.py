"""Published Whisper checkpoints in CTranslate2's folders: tokens equal to transformers' in float32, on speech, silence,
noise and short pieces. Set REAL_MODELS to a folder that holds them."""

import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from benchmarks.peers.speech_files import ggml
from quintet import LLM, SamplingParams
from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import resample
from quintet.model_loader.ctranslate2 import config_of, generation_config_of, state_dict_of
from quintet.model_loader.gguf_config import gguf_entries, read_generation_config
from quintet.model_loader.gguf_weights import entries
from tests.helpers.checkpoints.whisper import greedy, tone

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(7200)]  # two models, 24 transcripts each, by two programs

COUNT = 60  # tokens of a transcript
TEXTS = {
    "en": "The quick brown fox jumps over the lazy dog. It was a bright cold day in April, and the clocks were "
    "striking thirteen.",
    "en-us": "Please call me back at half past nine; I shall be at home until noon, and then at the office.",
    "de": "Guten Tag, wie geht es Ihnen heute? Das Wetter ist schön, und wir gehen spazieren.",
    "fr": "Bonjour, je voudrais deux billets pour Paris, s'il vous plaît.",
    "es": "Buenos días, ¿dónde está la estación de tren más cercana?",
    "it": "Buongiorno, vorrei un caffè e un bicchiere d'acqua, per favore.",
    "pt": "Bom dia, gostaria de reservar uma mesa para duas pessoas.",
    "nl": "Goedemorgen, hoe laat vertrekt de volgende trein naar Amsterdam?",
    "pl": "Dzień dobry, poproszę kawę i szklankę wody.",
    "ru": "Добрый день, сколько стоит билет до Москвы?",
    "tr": "Günaydın, en yakın istasyon nerede acaba?",
}
Samples = np.ndarray[Any, np.dtype[np.float32]]


def spoken(voice: str) -> Samples:
    """Returns speech at 16 kHz."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("install espeak-ng, which speaks the texts")
    made = subprocess.run(["espeak-ng", "-v", voice, "--stdout", TEXTS[voice]], check=True, capture_output=True)
    samples, rate = soundfile.read(io.BytesIO(made.stdout), dtype="float32")
    return resample(samples, rate)


def audios() -> dict[str, Samples]:
    """Returns what is transcribed, by name; voices are languages."""
    speech = {voice: spoken(voice) for voice in TEXTS}
    drawn = np.random.default_rng(0)
    return {
        **speech,
        "silence": np.zeros(3 * SAMPLE_RATE, np.float32),
        "noise": (0.05 * drawn.standard_normal(5 * SAMPLE_RATE)).astype(np.float32),
        "chord": tone(1, 4.0),
        "1 s": speech["en"][:SAMPLE_RATE],
        "29.9 s": np.resize(speech["en-us"], int(29.9 * SAMPLE_RATE)),
        "30 s": np.resize(speech["en"], 30 * SAMPLE_RATE),
    }


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_tokens_equal_transformers(name: str) -> None:
    folder = Path(os.environ.get("REAL_MODELS", "")) / name
    if not (folder / "model.bin").is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {name}")
    model = WhisperForConditionalGeneration(WhisperConfig(**{**config_of(folder), "dtype": None})).float().eval()
    absent = model.load_state_dict({k: v.float() for k, v in state_dict_of(folder).items()}, strict=False)
    assert absent.missing_keys == ["proj_out.weight"] and not absent.unexpected_keys, "the head is the embedding"
    model.generation_config = GenerationConfig(**generation_config_of(folder))
    extract = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    llm = LLM(str(folder), device="cpu", dtype="float32", use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=COUNT)
    prompts, names = [], []
    for what, samples in audios().items():
        language = "" if name.endswith(".en") else f"<|{what[:2] if what in TEXTS else 'en'}|><|transcribe|>"
        for timed in ("<|notimestamps|>", ""):
            media = {"audio": (samples, SAMPLE_RATE)}
            prompts.append({"prompt": f"<|startoftranscript|>{language}{timed}", "multi_modal_data": media})
            names.append((what, timed, samples))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wrong = []
    for (what, timed, samples), output in zip(names, outputs, strict=True):
        features = torch.from_numpy(extract(samples, sampling_rate=SAMPLE_RATE).input_features)
        want = greedy(model, features, output.prompt_token_ids, COUNT)
        if list(output.outputs[0].token_ids) != want:
            wrong.append((what, timed, output.outputs[0].text, want))
    assert not wrong
    llm.close()


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_files_of_whisper_cpp_say_the_same(name: str, tmp_path: Path) -> None:
    """What such a file lacks (special tokens, tokens that are not sampled) is what the folder has."""
    folder = Path(os.environ.get("REAL_MODELS", "")) / name
    if not (folder / "model.bin").is_file():
        pytest.skip(f"set REAL_MODELS to a folder that holds {name}")
    file = ggml(folder, "float32", tmp_path / "ggml.bin")
    rules = generation_config_of(folder)
    del rules["alignment_heads"]
    assert read_generation_config(file) == rules and gguf_entries(file) == config_of(folder)
    want = state_dict_of(folder)
    found = {name: each.tensor() for name, each in entries(file)}
    assert found.keys() == want.keys() and all(torch.equal(found[each].half(), want[each].half()) for each in want)


def test_tokens_on_tpu_equal_the_cpus() -> None:
    """On JAX's CPU devices where there is no TPU."""
    folder = Path(os.environ.get("REAL_MODELS", "")) / "whisper-tiny.en"
    if not (folder / "model.bin").is_file():
        pytest.skip("set REAL_MODELS to a folder that holds whisper-tiny.en")
    prompts = [
        {"prompt": f"<|startoftranscript|>{timed}", "multi_modal_data": {"audio": (samples, SAMPLE_RATE)}}
        for samples in audios().values()
        for timed in ("<|notimestamps|>", "")
    ]
    found = {}
    for device in ("cpu", "tpu"):
        sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
        llm = LLM(str(folder), device=device, dtype="float32", use_tqdm=False, **sizes)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=COUNT), use_tqdm=False)
        found[device] = [list(each.outputs[0].token_ids) for each in outputs]
        llm.close()
    assert found["tpu"] == found["cpu"]
