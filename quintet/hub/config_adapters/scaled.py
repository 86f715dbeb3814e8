"""config.json of families that differ from served ones in names of entries and a few numbers."""

import math
from collections.abc import Mapping
from typing import Any

from quintet.hub.config_adapters.adapter import ConfigAdapter, Entries

TELECHAT3_SCALE = 0.07  # of the logarithm of YaRN's factor, where YaRN has 0.1
YARN_LENGTHS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
LLAMA_SCALES = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}


def _score_scale(entries: Entries) -> float:
    """Returns the factor of attention's scores that is Llama's, and that Granite's config names."""
    return float((entries["hidden_size"] // entries["num_attention_heads"]) ** -0.5)


def _minicpm(entries: Entries) -> Entries:
    return {
        **entries,
        "embedding_multiplier": entries["scale_emb"],
        "residual_multiplier": entries["scale_depth"] / math.sqrt(entries["num_hidden_layers"]),
        "attention_multiplier": _score_scale(entries),
        "logits_scaling": entries["hidden_size"] / entries["dim_model_base"],
    }


def _teleflm(entries: Entries) -> Entries:
    """With muP (Yang et al. 2022) the embedding and the logits are multiplied."""
    scales = {}
    if entries["use_mup"]:
        logits = entries["mup_scale_factor"] / entries["output_mult"]
        scales = {"embedding_multiplier": entries["input_mult"], "logits_scaling": logits}
    return {**LLAMA_SCALES, **entries, "attention_multiplier": _score_scale(entries), **scales}


def _telechat2(entries: Entries) -> Entries:
    """Positions turn by another base where texts are longer than those of the first training."""
    trained, first = entries["training_seqlen"], entries.get("base_seqlen")
    if first and trained > first:
        raise ValueError(f"training_seqlen is {trained} and base_seqlen {first}; equal ones are known")
    heads = entries.get("num_key_value_heads") or entries["num_attention_heads"]
    return {"max_position_embeddings": trained, **entries, "num_key_value_heads": heads}


def _telechat3(entries: Entries) -> Entries:
    """Its YaRN multiplies cosines and sines by less."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = entries.get(name)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "telechat3-yarn":
            known = {each: rope[each] for each in (*YARN_LENGTHS, "rope_theta") if each in rope}
            scale = TELECHAT3_SCALE * math.log(rope["factor"]) + 1.0
            entries = {**entries, name: {**known, "rope_type": "yarn", "attention_factor": scale}}
    return entries


def _deepseek(entries: Entries) -> Entries:
    return {**entries, "num_key_value_heads": entries.get("num_key_value_heads") or entries["num_attention_heads"]}


def _sarvam_mla(entries: Entries) -> Entries:
    """Its head_dim is the width of what is cached. YaRN is DeepSeek's, whatever it is called."""
    known = {name: value for name, value in entries.items() if name != "head_dim"}
    rope = known.get("rope_scaling")
    if isinstance(rope, Mapping):
        known["rope_scaling"] = {**{name: each for name, each in rope.items() if name != "type"}, "rope_type": "yarn"}
    return known


def _param2(entries: Entries) -> Entries:
    """The features of the experts that serve every token are given for all of them together."""
    total, count = entries.get("moe_shared_expert_intermediate_size"), entries["n_shared_experts"]
    if total and count:
        if total % count:
            raise ValueError(
                f"moe_shared_expert_intermediate_size is {total}, no multiple of the {count} shared experts"
            )
        entries = {**entries, "moe_shared_expert_intermediate_size": total // count}
    return {**entries, "num_key_value_heads": entries.get("num_key_value_heads") or entries["num_attention_heads"]}


def _pangu(entries: Entries) -> Entries:
    biased = entries.get("attention_bias")
    return {**entries, "attention_bias": bool(entries["bias"] if biased is None else biased)}


LING_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
SARVAM: Mapping[str, Any] = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
BAILING_LIKE: Mapping[str, Any] = {
    **SARVAM,
    "partial_rotary_factor": 1.0,
    "score_function": "sigmoid",
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
}
# by model_type
SCALED_ADAPTERS: Mapping[str, ConfigAdapter] = {
    "PanguEmbedded": ConfigAdapter(
        "llama", defaults={"bias": True, "rope_theta": 16000000.0, "rms_norm_eps": 1e-5}, read=_pangu
    ),
    "TeleFLM": ConfigAdapter(
        "granite",
        defaults={"use_mup": False, "mup_scale_factor": 1.0, "input_mult": 1.0, "output_mult": 1.0},
        read=_teleflm,
    ),
    "deepseek": ConfigAdapter(
        "qwen2_moe",
        {"n_routed_experts": "num_experts"},
        {"n_shared_experts": 0, "norm_topk_prob": False, "first_k_dense_replace": 0, "moe_layer_freq": 1},
        _deepseek,
    ),
    "minicpm": ConfigAdapter(
        "granite",
        defaults={"scale_emb": 1, "dim_model_base": 1, "scale_depth": 1, "tie_word_embeddings": True},
        read=_minicpm,
    ),
    "orion": ConfigAdapter(
        "stablelm",
        {"rms_norm_eps": "layer_norm_eps"},
        {
            "partial_rotary_factor": 1.0,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
        },
    ),
    "param2moe": ConfigAdapter(
        "glm4_moe", LING_NAMES, {**BAILING_LIKE, "routed_scaling_factor": 1.0, "rope_theta": 1000000.0}, _param2
    ),
    "sarvam_mla": ConfigAdapter("deepseek_v3", LING_NAMES, {**SARVAM, "q_lora_rank": None}, _sarvam_mla),
    "sarvam_moe": ConfigAdapter("glm4_moe", LING_NAMES, {**BAILING_LIKE, "head_dim": 256}),
    "telechat": ConfigAdapter(
        "llama",
        {
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
            "seq_length": "max_position_embeddings",
        },
        {"training_seqlen": 8192, "embed_layernorm": False, "apply_residual_connection_post_layernorm": False},
        _telechat2,
    ),
    "telechat3": ConfigAdapter("llama", defaults={"head_dim": 128, "tie_word_embeddings": False}, read=_telechat3),
}
