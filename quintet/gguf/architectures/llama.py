"""Llama and the families that are near it."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import Architecture, Entries, experts, query_bias
from quintet.gguf.architectures.rope import rope, yarn_with_growth
from quintet.gguf.architectures.tables import EXPERTS, LATER_NORM, LLAMA, PERMUTED, PLAIN
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames


def _llama(model: GGUFModel) -> Entries:
    entries: Entries = {"rope_parameters": rope(model), "attention_bias": query_bias(model)}
    entries["mlp_bias"] = model.has("blk.0.ffn_up.bias")
    entries["sliding_window"] = model.window
    return entries | (experts(model, "num_local_experts") if _is_mixtral(model) else {})


def _llama_kind(model: GGUFModel) -> str:
    """llama.cpp has all of them in one architecture; windows are ours, which it passes over."""
    if _is_mixtral(model):
        return "mixtral"
    return "mistral" if model.window else "llama"


def _is_mixtral(model: GGUFModel) -> bool:
    return bool(model.get("expert_count", 0))


def _granite(model: GGUFModel) -> Entries:
    return _llama(model) | multipliers(model)


def multipliers(model: GGUFModel) -> Entries:
    """Granite's."""
    return {
        "attention_multiplier": model.number("attention.scale", model.head_dim**-0.5),
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _granite_moe(model: GGUFModel) -> Entries:
    if model.get("expert_shared_feed_forward_length"):
        raise ValueError(f"{model.path} has shared experts beside the others, which granitemoe here does not")
    return _granite(model)


def _smollm3(model: GGUFModel) -> Entries:
    return _llama(model) | {"use_sliding_window": False, "no_rope_layer_interval": 4}


def _ernie(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "use_bias": query_bias(model)}


def _seed_oss(model: GGUFModel) -> Entries:
    output = model.has("blk.0.attn_output.bias")
    return {"rope_parameters": rope(model), "attention_bias": query_bias(model), "attention_out_bias": output}


def _ministral3(model: GGUFModel) -> Entries:
    return {"rope_parameters": yarn_with_growth(model), "sliding_window": model.window}


ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", PERMUTED, _llama),
    "ernie4_5": Architecture("ernie4_5", PLAIN, _ernie),
    "granite": Architecture("granite", PERMUTED, _granite),
    "granitemoe": Architecture("granitemoe", PERMUTED, _granite_moe),
    "llama": Architecture(_llama_kind, PERMUTED, _llama),
    "mistral3": Architecture("ministral3", ArchitectureNames({**LLAMA, **EXPERTS}, permutes_qk=True), _ministral3),
    "seed_oss": Architecture("seed_oss", ArchitectureNames({**LLAMA, **LATER_NORM}), _seed_oss),
    "smollm3": Architecture("smollm3", PERMUTED, _smollm3),
}
