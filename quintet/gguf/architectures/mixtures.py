"""Families with a mixture of experts, beside Qwen's and Mixtral."""

import functools
from collections.abc import Mapping

from quintet.gguf.architectures.architecture import Architecture, Entries, experts, query_bias, windows
from quintet.gguf.architectures.rope import latent_rope, rope
from quintet.gguf.architectures.tables import (
    EXPERTS,
    LATER_NORM,
    LLAMA,
    MIXTURE,
    SHARED_EXPERTS,
    bias_of_choice,
)
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import FUSED, ArchitectureNames, Computed, Joined

PHIMOE_MSCALE = 1.243163121016122  # of Phi-3.5-MoE's config.json
SIGMOID = 2  # expert_gating_func, as llama.cpp counts them
_CHOICE = "mlp.gate.e_score_correction_bias"


def grouped(model: GGUFModel) -> Entries:
    """Experts by the names of DeepSeek's configs: in groups, with some that serve every token."""
    groups = model.count("expert_group_count", 1) or 1
    return {
        **experts(model, "n_routed_experts"),
        "moe_intermediate_size": model.required_number("expert_feed_forward_length"),
        "n_shared_experts": model.count("expert_shared_count"),
        "first_k_dense_replace": model.count("leading_dense_block_count"),
        "n_group": groups,
        "topk_group": model.count("expert_group_used_count", groups) or groups,
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
    }


def _glm4_moe(model: GGUFModel) -> Entries:
    attention = {"attention_bias": query_bias(model), "use_qk_norm": model.in_any_layer("attn_q_norm.weight")}
    return {"rope_parameters": rope(model, partial=True), **attention, **grouped(model)}


def _dots1(model: GGUFModel) -> Entries:
    """Entries without windows, as llama.cpp computes it."""
    everything = {"sliding_window": None, "layer_types": ["full_attention"] * model.layers}
    return {"rope_parameters": rope(model), "attention_bias": query_bias(model), **everything, **grouped(model)}


def _bailing(model: GGUFModel, scores: str = "softmax") -> Entries:
    """The file has the fields of the published code."""
    known = grouped(model)
    turned = rope(model, partial=True)
    return {
        **known,
        "num_experts": known.pop("n_routed_experts"),
        "num_shared_experts": known.pop("n_shared_experts"),
        "rope_theta": turned["rope_theta"],
        "partial_rotary_factor": turned["partial_rotary_factor"],
        "score_function": scores,
        "moe_router_enable_expert_bias": scores == "sigmoid",
        "use_qkv_bias": query_bias(model),
        "use_bias": False,
    }


def _deepseek_kind(model: GGUFModel) -> str:
    """V3 chooses experts by sigmoid, with a bias."""
    return "deepseek_v3" if _has_sigmoid(model) else "deepseek_v2"


def _has_sigmoid(model: GGUFModel) -> bool:
    return model.in_any_layer("exp_probs_b.bias") or model.get("expert_gating_func") == SIGMOID


def latent(model: GGUFModel) -> Entries:
    """Sizes of latent attention; lengths of older files are those of the whole heads."""
    turned = model.required_number("rope.dimension_count")
    key = model.required_number("attention.key_length_mla", model.get("attention.key_length"))
    value = model.required_number("attention.value_length_mla", model.get("attention.value_length"))
    if key <= turned:
        raise ValueError(f"{model.path}: keys have {key} features, and {turned} of them are turned; fetch it again")
    return {
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.count("attention.q_lora_rank") or None,
        "kv_lora_rank": model.required_number("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "attention_bias": False,
    }


def _deepseek2(model: GGUFModel) -> Entries:
    entries = {**latent(model), "rope_parameters": latent_rope(model), **grouped(model)}
    if _has_sigmoid(model):
        return entries | {"rope_interleave": True}
    limited = entries["n_group"] > 1
    return entries | {"topk_method": "group_limited_greedy" if limited else "greedy", "norm_topk_prob": False}


def _glm_dsa(model: GGUFModel) -> Entries:
    """Layers without an indexer see what the last one before chose."""
    indexed = [model.has(f"blk.{index}.indexer.attn_k.weight") for index in range(model.layers)]
    sizes = (("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k"))
    return {
        **_deepseek2(model),
        "indexer_types": ["full" if each else "shared" for each in indexed],
        **{f"index_{name}": model.required_number(f"attention.indexer.{key}") for name, key in sizes},
    }


def _minicpm3(model: GGUFModel) -> Entries:
    """Multipliers, which the file does not have, are the config's defaults, as in llama.cpp."""
    turned, key = model.required_number("rope.dimension_count"), model.required_number("attention.key_length")
    rank = {"q_lora_rank": model.shape("blk.0.attn_q_a.weight")[0]}
    return {
        **rank,
        "kv_lora_rank": model.required_number("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": model.shape("blk.0.attn_kv_b.weight")[0] // model.heads - (key - turned),
        "rope_parameters": latent_rope(model),
        "attention_bias": False,
    }


def _gpt_oss(model: GGUFModel) -> Entries:
    """Windows in every other layer, from the first on; the ramp of YaRN has ends that are no whole numbers."""
    return {
        "rope_parameters": {**rope(model), "truncate": False},
        "attention_bias": query_bias(model),
        "intermediate_size": model.required_number("expert_feed_forward_length"),
        **windows(model, every=2),
        **experts(model, "num_local_experts"),
    }


def _minimax_m2(model: GGUFModel) -> Entries:
    width = model.required_number("expert_feed_forward_length")
    chosen = experts(model, "num_local_experts")
    return {"rope_parameters": rope(model, partial=True), "intermediate_size": width, **chosen}


def _olmoe(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "norm_topk_prob": False, **experts(model)}


def _phimoe(model: GGUFModel) -> Entries:
    """Cosines and sines are multiplied by the published model's number, which its files do not have."""
    turned = rope(model)
    if turned.pop("attention_factor", None) is not None:
        turned |= dict.fromkeys(("short_mscale", "long_mscale"), PHIMOE_MSCALE)
    biased = {"attention_bias": query_bias(model), "lm_head_bias": model.has("output.bias")}
    return {"rope_parameters": turned, "sliding_window": model.window, **biased, **experts(model, "num_local_experts")}


def _hunyuan_moe(model: GGUFModel) -> Entries:
    chosen = model.required_number("expert_used_count")
    return {
        "rope_parameters": rope(model),
        "attention_bias": query_bias(model),
        "intermediate_size": model.required_number("expert_feed_forward_length"),
        "num_experts": model.required_number("expert_count"),
        "moe_topk": chosen,
    }


def _ernie_moe(model: GGUFModel) -> Entries:
    first = model.count("leading_dense_block_count")
    return {
        "rope_parameters": rope(model),
        "moe_num_experts": model.required_number("expert_count"),
        "moe_k": model.required_number("expert_used_count"),
        "moe_intermediate_size": model.required_number("expert_feed_forward_length"),
        "moe_num_shared_experts": model.count("expert_shared_count"),
        "moe_layer_start_index": first,
        "moe_layer_end_index": model.layers - 1,
        "moe_layer_interval": model.required_number("interleave_moe_layer_step", 1),
    }


def _afmoe(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": rope(model),
        **windows(model, every=4),
        **experts(model),
        "moe_intermediate_size": model.required_number("expert_feed_forward_length"),
        "num_shared_experts": model.count("expert_shared_count"),
        "num_dense_layers": model.count("leading_dense_block_count"),
        "route_scale": model.number("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


def _exaone_moe(model: GGUFModel) -> Entries:
    known = grouped(model)
    return {
        "rope_parameters": rope(model),
        **windows(model),
        **known,
        "num_experts": known["n_routed_experts"],
        "num_shared_experts": known["n_shared_experts"],
    }


_SHARED = {**LLAMA, **EXPERTS, **SHARED_EXPERTS}
LATENT = {
    **{name: module for name, module in _SHARED.items() if name not in ("attn_k", "attn_v")},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
LATENT_COMPUTED = {
    **bias_of_choice(_CHOICE),
    "self_attn.kv_b_proj.weight": Computed("latent_kv", ("attn_k_b.weight", "attn_v_b.weight")),
}
_INDEXER = {
    f"indexer.{name}": f"self_attn.indexer.{module}"
    for name, module in (("attn_q_b", "wq_b"), ("attn_k", "wk"), ("proj", "weights_proj"), ("k_norm", "k_norm"))
}
_BAILING = ArchitectureNames(
    {name: module for name, module in _SHARED.items() if name not in FUSED["attn_qkv"]},
    permutes_qk=True,
    joined={"self_attn.query_key_value": Joined(FUSED["attn_qkv"])},
)
_AFMOE = {
    **_SHARED,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture("afmoe", ArchitectureNames(_AFMOE, computed=bias_of_choice("mlp.expert_bias")), _afmoe),
    "bailingmoe": Architecture("bailing_moe", _BAILING, _bailing),
    "bailingmoe2": Architecture(
        "bailing_moe_v2",
        ArchitectureNames(
            {**_SHARED, "attn_qkv": "self_attn.query_key_value"}, computed=bias_of_choice("mlp.gate.expert_bias")
        ),
        functools.partial(_bailing, scores="sigmoid"),
    ),
    "deepseek2": Architecture(
        _deepseek_kind,
        ArchitectureNames(LATENT, computed=LATENT_COMPUTED),
        _deepseek2,
        has_head_dim=False,
    ),
    "dots1": Architecture("dots1", ArchitectureNames(_SHARED, computed=bias_of_choice(_CHOICE)), _dots1),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        ArchitectureNames(_SHARED, computed=bias_of_choice("mlp.moe_statics.e_score_correction_bias")),
        _ernie_moe,
    ),
    "exaone-moe": Architecture(
        "exaone_moe", ArchitectureNames(_SHARED, computed=bias_of_choice("mlp.e_score_correction_bias")), _exaone_moe
    ),
    "glm4moe": Architecture(
        "glm4_moe", ArchitectureNames({**_SHARED, **LATER_NORM}, computed=bias_of_choice(_CHOICE)), _glm4_moe
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        ArchitectureNames({**LATENT, **_INDEXER}, computed=LATENT_COMPUTED),
        _glm_dsa,
        has_head_dim=False,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        ArchitectureNames(
            {**LLAMA, **LATER_NORM, "ffn_gate_inp": "mlp.gate", "ffn_down_exps": "mlp.experts.down_proj"},
            transposed=("gate_up_proj", "down_proj"),
            computed={"self_attn.sinks": Computed("same", ("attn_sinks.weight",))},
            joined={"mlp.experts.gate_up_proj": Joined(("ffn_gate_exps", "ffn_up_exps"), "interleaved")},
            biased_experts=True,
        ),
        _gpt_oss,
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", ArchitectureNames(_SHARED), _hunyuan_moe),
    "minimax-m2": Architecture(
        "minimax_m2",
        ArchitectureNames(MIXTURE.blocks, computed=bias_of_choice("mlp.e_score_correction_bias")),
        _minimax_m2,
    ),
    "minicpm3": Architecture("minicpm3", ArchitectureNames(LATENT), _minicpm3, has_head_dim=False),
    "olmoe": Architecture("olmoe", MIXTURE, _olmoe),
    "phimoe": Architecture("phimoe", MIXTURE, _phimoe, has_head_dim=False),
}
