"""Mapping of one of GGUF's architectures to one of our families, and what several of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.gguf.cursor import Array
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames

Entries = dict[str, Any]

SIZES: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
COMMON: Mapping[str, str] = {**SIZES, RMS_EPS: "rms_norm_eps"}


def layer_norms(name: str) -> Mapping[str, str]:
    """The common entries of a family with LayerNorm, whose config calls its epsilon `name`."""
    return {**SIZES, LAYER_NORM_EPS: name}


@dataclass(frozen=True)
class Architecture:
    """Mapping of one of GGUF's architectures to one of our families."""

    kind: str | Callable[[GGUFModel], str]  # model_type
    names: ArchitectureNames | Callable[[GGUFModel], ArchitectureNames]
    entries: Callable[[GGUFModel], Entries] = lambda model: {}
    common: Mapping[str, str] = field(default_factory=lambda: COMMON)  # key of the file -> entry of config.json
    embedding: str = "token_embd.weight"  # [tokens, features]
    dtype: str | None = None  # where float16 does not reach as far as the activations
    has_head_dim: bool = True  # the family's config has "head_dim"
    generation: Callable[[GGUFModel], Entries] = lambda model: {}  # entries of generation_config.json


def experts(model: GGUFModel, name: str = "num_experts", used: str = "num_experts_per_tok") -> Entries:
    """Numbers of experts, of a layer and of a token."""
    return {
        name: model.required_number("expert_count"),
        used: model.required_number("expert_used_count"),
    }


def query_bias(model: GGUFModel) -> bool:
    """True if queries have a bias."""
    return model.in_any_layer("attn_q.bias") or model.in_any_layer("attn_qkv.bias")


def windows(model: GGUFModel, every: int = 0) -> Entries:
    """Window, and which layers have it: by the file's list, or all but each `every`-th; 0: none."""
    key = "attention.sliding_window_pattern"
    period = model.metadata.get(f"{model.prefix}.{key}", every)
    if isinstance(period, Array):
        windowed = model.per_layer(key)
    elif isinstance(period, int) and period >= 0:
        windowed = [bool(period) and (index + 1) % period != 0 for index in range(model.layers)]
    else:
        raise ValueError(f"{model.path}: {model.prefix}.{key} is {str(period)[:40]!r}, no list and no whole number")
    kinds = ["sliding_attention" if each and model.window else "full_attention" for each in windowed]
    return {"sliding_window": model.window, "layer_types": kinds}
