"""Small random Whisper models by transformers' classes, audio, and what transformers samples greedily."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.audio.log_mel import FEATURES
from quintet_tools.checkpoints.encoder_decoders import WHISPER
from quintet_tools.checkpoints.tiny import folder_of_all

EOT, SOT, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(60, 69)
ROWS, BINS = 100, 20  # 2 s
assert WHISPER["vocab_size"] == NO_TIMESTAMPS + 1 + ROWS + 1, "text, special tokens, timestamps from 0.00 to 2.00"
PROMPT = [SOT, EN, TRANSCRIBE, NO_TIMESTAMPS]
TIMED = PROMPT[:-1]
GENERATION: dict[str, Any] = {
    "suppress_tokens": [1, 7, 30, SOT, EN, DE, PREVIOUS], "begin_suppress_tokens": [5, EOT],
    "no_timestamps_token_id": NO_TIMESTAMPS, "max_initial_timestamp_index": 50, "decoder_start_token_id": SOT,
    "eos_token_id": EOT, "pad_token_id": EOT, "bos_token_id": EOT,
}  # fmt: skip


@functools.cache
def small_model(**differences: Any) -> tuple[Path, WhisperForConditionalGeneration]:
    """Returns a checkpoint's folder, and transformers' model of it."""
    torch.manual_seed(3)
    made = WhisperForConditionalGeneration(WhisperConfig(**{**WHISPER, **differences})).eval()
    for name, each in made.named_parameters():  # biases and norms begin as zeros and ones
        each.data.copy_(torch.randn_like(each) * 0.3 + ("norm.weight" in name))
    made.generation_config = GenerationConfig(**GENERATION)
    folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
    made.save_pretrained(folder)
    return folder, made


def tone(seed: int, seconds: float = 1.5, rate: int = 16_000) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns a chord with noise."""
    drawn = np.random.default_rng(seed)
    at = np.arange(int(seconds * rate)) / rate
    chord = sum(np.sin(2 * np.pi * hertz * at + hertz) for hertz in drawn.uniform(100, 4000, 4))
    return (0.1 * chord + 0.02 * drawn.standard_normal(len(at))).astype(np.float32)


def features_of(audio: Any, bins: int = BINS, rows: int = ROWS) -> torch.Tensor:
    """Returns the encoder's input [1, bins, frames]."""
    item = SpeechInput(bins, rows, (SOT,)).item(audio, "the prompt")
    return torch.from_numpy(item.fields[FEATURES].array().copy())[None]


@torch.inference_mode()
def greedy(
    model: WhisperForConditionalGeneration, features: torch.Tensor, prompt: Sequence[int], count: int,
    stops: bool = True,
) -> list[int]:  # fmt: skip
    """Returns transformers' tokens, with its own logits processors, one step after the other."""
    rules, begin = model.generation_config, len(prompt)
    processors: list[Any] = [
        SuppressTokensAtBeginLogitsProcessor(rules.begin_suppress_tokens, begin),
        SuppressTokensLogitsProcessor(rules.suppress_tokens),
    ]
    if rules.no_timestamps_token_id not in prompt:
        processors.append(WhisperTimeStampLogitsProcessor(rules, begin))
    encoded, ids = model.model.encoder(features), torch.tensor([list(prompt)])
    while ids.shape[1] < begin + count:
        scores = model(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1].float()
        for each in processors:
            scores = each(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
        if stops and int(ids[0, -1]) == rules.eos_token_id:
            break
    return ids[0, begin:].tolist()
