"""A small random Moonshine model by transformers' classes that writes letters, and what transformers makes of audio."""

import functools
import string
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import GenerationConfig, MoonshineConfig, MoonshineForConditionalGeneration, PreTrainedTokenizerFast

from quintet_tools.checkpoints.tiny import folder_of_all

LETTERS = [*string.ascii_letters, "\u0120"]  # the last stands for a space
BOS, EOS = len(LETTERS), len(LETTERS) + 1
GENERATION = {"decoder_start_token_id": BOS, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
SIZES: dict[str, Any] = {
    "vocab_size": EOS + 1, "hidden_size": 72, "intermediate_size": 96, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2,
    "partial_rotary_factor": 0.9, "max_position_embeddings": 194, "pad_head_dim_to_multiple_of": 8, **GENERATION,
}  # fmt: skip


@functools.cache
def small_moonshine(**generation: Any) -> tuple[Path, MoonshineForConditionalGeneration]:
    """Returns a checkpoint's folder, and transformers' model of it. `generation`: entries of its generation config."""
    torch.manual_seed(3)
    made = MoonshineForConditionalGeneration(MoonshineConfig(**SIZES)).eval()
    for name, each in made.named_parameters():  # norms begin as ones; convolutions sum many samples
        each.data.copy_(torch.randn_like(each) * (0.1 if "conv" in name else 0.3) + ("norm.weight" in name))
    made.generation_config = GenerationConfig(**{**GENERATION, **generation})
    folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
    made.save_pretrained(folder)
    backend = Backend(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder, made


@torch.inference_mode()
def greedy(model: MoonshineForConditionalGeneration, audio: Any, count: int, prompt: tuple[int, ...] = ()) -> list[int]:
    """Returns the tokens of transformers' generate() behind the start token, or behind `prompt`."""
    ids = torch.tensor([prompt]) if prompt else None
    found = model.generate(
        torch.from_numpy(audio)[None], decoder_input_ids=ids, max_new_tokens=count, do_sample=False, num_beams=1
    )
    return found[0, max(1, len(prompt)) :].tolist()
