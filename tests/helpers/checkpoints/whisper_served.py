"""A small random Whisper model with a tokenizer of its own, as servers and commands load it."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import GenerationConfig, PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

from quintet_tools.checkpoints.tiny import folder_of_all

SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
TIMES = [f"<|{step * 0.02:.2f}|>" for step in range(1501)]


def byte_backend(special: tuple[str, ...] = SPECIAL) -> Backend:
    """Returns a tokenizer with a token for each byte, then Whisper's: special ones, and times."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Backend(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in special])
    made.add_tokens([AddedToken(each) for each in TIMES])
    return made


@functools.cache
def small_whisper() -> Path:
    """Returns the folder of a model that writes letters: its texts are as random as its weights."""
    backend = byte_backend()
    token = {name: backend.token_to_id(name) for name in SPECIAL}
    eot, sot = token["<|endoftext|>"], token["<|startoftranscript|>"]
    torch.manual_seed(5)
    config = WhisperConfig(
        vocab_size=backend.get_vocab_size(), d_model=32, num_mel_bins=80, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=1500, max_target_positions=64, pad_token_id=eot, bos_token_id=eot, eos_token_id=eot,
        decoder_start_token_id=sot,
    )  # fmt: skip
    made = WhisperForConditionalGeneration(config).eval()
    for name, each in made.named_parameters():
        each.data.copy_(torch.randn_like(each) * 0.3 + ("norm.weight" in name))
    unprintable = [at for at in range(256) if not backend.decode([at]).isascii() or not backend.decode([at]).isalpha()]
    made.generation_config = GenerationConfig(
        suppress_tokens=[*unprintable, *(token[name] for name in SPECIAL[1:])], begin_suppress_tokens=[eot],
        no_timestamps_token_id=token["<|notimestamps|>"], max_initial_timestamp_index=50, decoder_start_token_id=sot,
        eos_token_id=eot, pad_token_id=eot, bos_token_id=eot, is_multilingual=True,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
    made.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def said(seconds: float, hertz: float = 170.0) -> np.ndarray:
    """Returns sound that is speech by its energy: syllables of 200 ms, at 16 kHz."""
    t = np.arange(round(seconds * 16_000)) / 16_000
    return (0.1 * (0.55 - 0.45 * np.cos(2 * np.pi * 5 * t)) * np.sin(2 * np.pi * hertz * t)).astype(np.float32)
