"""Llama and the families that are near it."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import Architecture, Entries, experts, query_bias
from quintet.gguf.architectures.rope import rope, yarn_with_growth
from quintet.gguf.architectures.tables import EXPERTS, LATER_NORM, LLAMA, PERMUTED, PLAIN, SHARED_EXPERTS
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Joined


def _llama(model: GGUFModel) -> Entries:
    entries: Entries = {"rope_parameters": rope(model), "attention_bias": query_bias(model)}
    entries["mlp_bias"] = model.has("blk.0.ffn_up.bias")
    entries["sliding_window"] = model.window
    return entries | (experts(model, "num_local_experts") if _is_mixtral(model) else {})


def _llama_embed(model: GGUFModel) -> Entries:
    """Embedders of NVIDIA: tokens see both ways, and texts are pooled by the mean."""
    mean = {} if model.get("pooling_type") else {"pooling_type": "MEAN"}
    return _llama(model) | {"architectures": ["LlamaBidirectionalModel"], "is_causal": False} | mean


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


def _minicpm(model: GGUFModel) -> Entries:
    """Granite's multipliers; those of the first files are the first model's."""
    width = model.required_number("embedding_length")
    return {
        **_granite(model),
        "embedding_multiplier": model.number("embedding_scale", 12.0),
        "residual_multiplier": model.number("residual_scale", 1.4 * model.layers**-0.5),
        "logits_scaling": model.number("logit_scale", width / 256),
    }


def _apertus(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "attention_bias": query_bias(model)}


def _baichuan(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model)}


def _smollm3(model: GGUFModel) -> Entries:
    return _llama(model) | {"use_sliding_window": False, "no_rope_layer_interval": 4}


def _llama4(model: GGUFModel) -> Entries:
    """Numbers that the file does not have are those of all that are published, as in llama.cpp."""
    whole = model.get("attention.sliding_window") == 0  # MobileLLM: each layer sees everything, and turns
    kinds = ["full_attention" if whole or not (i + 1) % 4 else "chunked_attention" for i in range(model.layers)]
    return {
        **experts(model, "num_local_experts"),
        "rope_parameters": rope(model),
        "attention_bias": query_bias(model),
        "intermediate_size": model.required_number("expert_feed_forward_length"),
        "intermediate_size_mlp": model.required_number("feed_forward_length"),
        "moe_layers": [i for i in range(model.layers) if model.has(f"blk.{i}.ffn_gate_inp.weight")],
        "layer_types": kinds,
        "no_rope_layers": [int(whole or each == "chunked_attention") for each in kinds],
        "attention_chunk_size": 8192,
        "use_qk_norm": model.get("expert_count") != 128,  # which Maverick has
    }


def _ernie(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "use_bias": query_bias(model)}


def _seed_oss(model: GGUFModel) -> Entries:
    output = model.has("blk.0.attn_output.bias")
    return {"rope_parameters": rope(model), "attention_bias": query_bias(model), "attention_out_bias": output}


def _ministral3(model: GGUFModel) -> Entries:
    return {"rope_parameters": yarn_with_growth(model), "sliding_window": model.window}


_APERTUS = ArchitectureNames(
    {**LLAMA, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    stated={f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_n", "alpha_p")},
)
_BAICHUAN = ArchitectureNames(
    {name: module for name, module in LLAMA.items() if name not in ("attn_q", "attn_k", "attn_v")},
    permutes_qk=True,
    joined={"self_attn.W_pack": Joined(("attn_q", "attn_k", "attn_v"))},
)
_LLAMA4 = ArchitectureNames(
    {**LLAMA, **EXPERTS, **SHARED_EXPERTS},
    transposed=tuple(f".experts.{name}_proj" for name in ("gate", "up", "down")),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": Architecture("apertus", _APERTUS, _apertus),
    "arcee": Architecture("arcee", PERMUTED, _llama),
    "baichuan": Architecture("baichuan", _BAICHUAN, _baichuan, has_head_dim=False),
    "ernie4_5": Architecture("ernie4_5", PLAIN, _ernie),
    "granite": Architecture("granite", PERMUTED, _granite),
    "granitemoe": Architecture("granitemoe", PERMUTED, _granite_moe),
    "llama": Architecture(_llama_kind, PERMUTED, _llama),
    "llama-embed": Architecture("llama", PERMUTED, _llama_embed),
    "llama4": Architecture("llama4_text", _LLAMA4, _llama4),
    "minicpm": Architecture("granite", PERMUTED, _minicpm),
    "mistral3": Architecture("ministral3", ArchitectureNames({**LLAMA, **EXPERTS}, permutes_qk=True), _ministral3),
    "seed_oss": Architecture("seed_oss", ArchitectureNames({**LLAMA, **LATER_NORM}), _seed_oss),
    "smollm3": Architecture("smollm3", PERMUTED, _smollm3),
}
