"""A model without weights beside a tokenizer, for answers with a shape."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from quintet import SamplingParams
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from tests.helpers.checkpoints.tokenizers import byte_level

SIZE = 340  # of the vocabulary: some more tokens than the tokenizer has, as models have them


@functools.cache
def folder() -> Path:
    """End-of-text is token 1."""
    from transformers import LlamaConfig

    from quintet_tools.checkpoints.tiny import folder_of_all

    made = Path(tempfile.mkdtemp(dir=folder_of_all().name))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(
        vocab_size=SIZE, num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, **sizes
    ).save_pretrained(made)
    byte_level(made)
    return made


def config(device: str = "null", **settings: Any) -> EngineConfig:
    settings = {"max_model_len": 256, "num_pages": 80, **settings}
    return EngineConfig.from_kwargs(model=str(folder()), device=device, load_format="dummy", **settings)


def client(device: str = "null", **settings: Any) -> EngineClient:
    return EngineClient(config(device, **settings), progress=False)


def params(max_tokens: int = 60, **given: Any) -> SamplingParams:
    """Hot, so that every token that may be drawn is."""
    shape = {name: given.pop(name) for name in ("json", "regex", "choice", "grammar", "json_object") if name in given}
    return SamplingParams(**{"temperature": 1.5, "max_tokens": max_tokens, "structured_outputs": shape, **given})
