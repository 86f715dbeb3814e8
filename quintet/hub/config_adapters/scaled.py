"""config.json of families that differ from served ones in names of entries and a few numbers."""

import math
from collections.abc import Mapping
from typing import Any

from quintet.hub.config_adapters.adapter import ConfigAdapter, Entries
from quintet.hub.config_checks import FEATURES

PARTS = ("attention", "ffn")  # of a layer in block_configs
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
    if known.get("score_function", "sigmoid") != "sigmoid":
        raise ValueError(f"score_function is {known['score_function']!r}; 'sigmoid' is known")
    rope = known.get("rope_scaling")
    if isinstance(rope, Mapping):
        if (kind := rope.get("rope_type", rope.get("type"))) not in ("yarn", "deepseek_yarn"):
            raise ValueError(f"rope_scaling has type {kind!r}; 'deepseek_yarn' is known")
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
    biased = bool(entries["bias"] if biased is None else biased)
    for name in ("interleaved_sliding_window", "param_sink_number"):
        if entries.get(name):
            raise ValueError(f"{name} is {entries[name]!r}, which is not computed here")
    if entries.get("qkv_bias") not in (None, biased):
        raise ValueError(f"qkv_bias is {entries['qkv_bias']!r} beside attention_bias {biased}; equal ones are known")
    return {**entries, "attention_bias": biased}


def _check_block(at: int, block: Any, entries: Entries) -> None:
    """Checks one layer's sizes; raises ValueError where one is missing or out of range."""
    if not isinstance(block, Mapping) or not all(isinstance(block.get(each), Mapping) for each in PARTS):
        raise ValueError(f"block_configs[{at}] has not the objects attention and ffn")
    attention, ffn = block["attention"], block["ffn"]
    if any(part.get(name) for part in (attention, ffn) for name in ("replace_with_linear", "sparsify")):
        return  # which the model refuses
    group, width, factor = attention.get("n_heads_in_group"), ffn.get("intermediate_size"), ffn.get("ffn_mult")
    grouped = type(group) is int and 1 <= group <= entries["num_attention_heads"]
    if type(factor) in (int, float):
        width = int(factor * entries["hidden_size"]) if 0 < factor * entries["hidden_size"] <= FEATURES else None
    wide = type(width) is int and 1 <= width <= FEATURES
    if not (attention.get("no_op") or grouped) or not (ffn.get("no_op") or wide):
        raise ValueError(f"block_configs[{at}] has n_heads_in_group {group!r} and ffn {dict(ffn)!r}")


def _nemotron_nas(entries: Entries) -> Entries:
    """Heads and widths are each layer's own; what is read for the whole model is the most of them."""
    blocks, heads = entries.get("block_configs"), entries["num_attention_heads"]
    if not isinstance(blocks, list) or len(blocks) != entries["num_hidden_layers"]:
        raise ValueError("block_configs has not an entry for each of num_hidden_layers")
    for at, block in enumerate(blocks):
        _check_block(at, block, entries)
    groups = [block["attention"].get("n_heads_in_group") for block in blocks]
    fewest = min((group for group in groups if group), default=1)
    if any(group and heads % group for group in groups):
        raise ValueError(f"n_heads_in_group has {groups}, and some do not divide num_attention_heads, {heads}")
    known = {name: value for name, value in entries.items() if name != "intermediate_size"}
    return {**known, "num_key_value_heads": heads // fewest}


def _plamo3(entries: Entries) -> Entries:
    """Positions of windows turn by a base of their own, and are not scaled."""
    window, pattern = entries["window_size"], entries["sliding_window_pattern"]
    given = entries.pop("sliding_window", None)  # a list in the first files, with null where a layer sees all
    rope: Entries = {"rope_type": "default", "rope_theta": entries["rope_theta"]}
    if entries["rope_scaling_factor"] != 1:
        scaled = {"factor": entries["rope_scaling_factor"], "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        first = entries["initial_context_length"]
        rope = {**rope, **scaled, "rope_type": "yarn", "original_max_position_embeddings": first}
    kinds = [
        "sliding_attention" if (at + 1) % pattern else "full_attention" for at in range(entries["num_hidden_layers"])
    ]
    if isinstance(given, list):
        windows = {each for each in given if each is not None}
        if len(given) != len(kinds) or len(windows) > 1 or not all(type(each) is int and each > 0 for each in windows):
            raise ValueError(f"sliding_window is {given!r}, not one window or null for each layer")
        kinds = ["full_attention" if each is None else "sliding_attention" for each in given]
        given = next(iter(windows), None)
    local = {"rope_type": "default", "rope_theta": entries["rope_local_theta"]}
    ropes = {"full_attention": rope, "sliding_attention": local}
    for name, ours in {"rope_scaling": None, "rope_parameters": ropes, "layer_types": kinds}.items():
        if entries.get(name) not in (None, ours):
            raise ValueError(f"{name} is {entries[name]!r}; what the other entries give is {ours!r}")
    known = {name: each for name, each in entries.items() if name not in ("rope_theta", "rope_scaling")}
    own = {"layer_types": kinds, "rope_parameters": ropes, "sliding_window": given or window}
    return {**known, **own, "query_pre_attn_scalar": entries["head_dim"]}


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
    "nemotron-nas": ConfigAdapter("llama", read=_nemotron_nas),
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
    "pangu_ultra_moe": ConfigAdapter(
        "deepseek_v3",
        defaults={
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "sandwich_norm": False,
            "router_enable_expert_bias": False,
        },
    ),
    "param2moe": ConfigAdapter(
        "glm4_moe", LING_NAMES, {**BAILING_LIKE, "routed_scaling_factor": 1.0, "rope_theta": 1000000.0}, _param2
    ),
    "plamo3": ConfigAdapter(
        "gemma3_text",
        defaults={
            "head_dim": 128,
            "initial_context_length": None,
            "num_key_value_heads": 4,
            "rope_local_theta": 10000.0,
            "rope_scaling_factor": 1,
            "rope_theta": 1000000.0,
            "sliding_window_pattern": 8,
            "tie_word_embeddings": True,
            "window_size": 2048,
        },
        read=_plamo3,
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
