"""Small models of families with an encoder: family -> entries of its config.json, and checkpoints made of them."""

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from quintet.conformance.harness.reference_model import VOCAB, Tiny
from quintet.media.audio.waveform import LEAST
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import folder_of_all, hushed

_SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 64,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    **_SIZES, "model_type": "whisper", "vocab_size": 170, "num_mel_bins": 20, "max_source_positions": 100,
    "max_target_positions": 64, "pad_token_id": 60, "bos_token_id": 60, "eos_token_id": 60,
    "decoder_start_token_id": 61,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    **_SIZES, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
MOONSHINE: dict[str, Any] = {
    "model_type": "moonshine", "vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 64,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 3,
    "decoder_num_attention_heads": 3, "encoder_num_key_value_heads": 3, "decoder_num_key_value_heads": 3,
    "partial_rotary_factor": 0.7, "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": {**_TEXT, "model_type": "bart"},
    "blenderbot": {**_TEXT, "model_type": "blenderbot", "scale_embedding": True},
    "blenderbot-small": {**_TEXT, "model_type": "blenderbot-small", "scale_embedding": True},
    "m2m_100": {**_TEXT, "model_type": "m2m_100"},
    "marian": {**_TEXT, "model_type": "marian", "scale_embedding": True, "activation_function": "swish"},
    "mbart": {**_TEXT, "model_type": "mbart", "scale_embedding": True},
    "mvp": {**_TEXT, "model_type": "mvp"},
    "pegasus": {**_TEXT, "model_type": "pegasus", "d_model": 36, "encoder_attention_heads": 3},
    "plbart": {**_TEXT, "model_type": "plbart"},
    "moonshine": MOONSHINE,
    "whisper": WHISPER,
}

SPEECH = ("moonshine", "whisper")  # whose encoders take audio


class Encoded(nn.Module):
    """A model with an input of its encoder, called as a decoder is: a reference of what is computed behind it."""

    def __init__(self, model: Any, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self._given = model, given

    def forward(self, ids: Tensor, use_cache: bool = False) -> Any:
        dtype = next(self.model.parameters()).dtype
        given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in self._given.items()}
        return self.model(**given, decoder_input_ids=ids, use_cache=use_cache)


@functools.cache
def encoder_decoder(family: str, seed: int = 0) -> Tiny:
    """Returns the checkpoint of a family; its reference is transformers' whole model."""
    return written(ENCODER_DECODERS[family], seed)


@torch.no_grad()
def written(entries: Mapping[str, Any], seed: int = 0) -> Tiny:
    """Writes a checkpoint of these entries of config.json, with random weights."""
    config = AutoConfig.for_model(**entries)
    kind = AutoModelForSpeechSeq2Seq if entries["model_type"] in SPEECH else AutoModelForSeq2SeqLM
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(seed)
        model = kind.from_config(config, attn_implementation="eager").float().eval()
        scatter(model)
        for module in model.modules():
            if hasattr(module, "create_weight"):  # positions that are computed
                module.weight.copy_(module.create_weight())
            if hasattr(module, "create_position_ids_from_input_ids"):  # padding, which no text has, has no position
                module.create_position_ids_from_input_ids = _positions
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
        model.save_pretrained(folder)
        return Tiny(folder, AutoConfig.from_pretrained(folder), model)


def _positions(ids: Tensor, padding: int, past: int) -> Tensor:
    """Numbers every token, as transformers' code does where none is padding (M2M-100)."""
    return torch.arange(ids.shape[1])[None] + past + padding + 1


def encoder_input(tiny: Tiny, seed: int, length: int) -> Tensor:
    """Returns random input of a model's encoder: token ids [length], samples [length * 400], or features [bins,
    frames]."""
    generator, config = torch.Generator().manual_seed(seed), tiny.config
    if config.model_type not in SPEECH:
        return torch.randint(3, config.vocab_size, (length,), dtype=torch.int32, generator=generator)
    if config.model_type == "moonshine":
        return torch.randn(max(length * 400, LEAST), generator=generator)
    return torch.randn(config.num_mel_bins, 2 * config.max_source_positions, generator=generator)


def behind(tiny: Tiny, given: Tensor) -> Tiny:
    """Returns the same checkpoint with a reference that decodes behind this input of its encoder."""
    if given.is_floating_point():
        named = {"input_values" if given.ndim == 1 else "input_features": given[None]}
    else:
        named = {"input_ids": given[None].long()}
    return Tiny(tiny.folder, tiny.config, Encoded(tiny.reference, named))
