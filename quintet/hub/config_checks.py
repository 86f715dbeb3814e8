"""Checks a config.json before a class or a model is built from it, so that no number of it costs memory or time."""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.models import added_for, built_in

MAX_INT32 = 2**31 - 1  # tokens and positions are int32
LAYERS, PARTS, FEATURES, STREAMS = 4096, 2**16, 2**24, 8  # far beyond any model

# Names of whole numbers in the families' files -> the least and the most.
INTEGER_ENTRIES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, LAYERS)),
    **dict.fromkeys(("sliding_window_pattern", "no_rope_layer_interval"), (1, LAYERS)),
    "decoder_sparse_step": (1, LAYERS),
    "max_window_layers": (0, MAX_INT32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), (1, PARTS)),
    "num_kv_heads": (1, PARTS),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (0, PARTS)),
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim", "word_embed_proj_dim"), (1, FEATURES)),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_model", "n_embed"), (1, FEATURES)
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (0, FEATURES)),
    "type_vocab_size": (0, MAX_INT32),  # 0: segments have no embedding, as in DeBERTa
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "max_position_embeddings", "n_positions"), (1, MAX_INT32)),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window", "window_size"), (1, MAX_INT32)),
    **dict.fromkeys(("max_seq_len", "seq_length", "padded_vocab_size"), (1, MAX_INT32)),
    **dict.fromkeys(("multi_query_group_num", "kv_channels"), (1, PARTS)),
    **dict.fromkeys(("num_shared_experts", "rotary_dim"), (0, PARTS)),
    **dict.fromkeys(("attention_chunk_size", "floor_scale"), (1, MAX_INT32)),
    "vocab_size_per_layer_input": (0, MAX_INT32),  # 0: layers have no embeddings of their own (assistants of Gemma 4)
    **dict.fromkeys(("intermediate_size_mlp", "laurel_rank"), (1, FEATURES)),
    "hidden_size_per_layer_input": (0, FEATURES),  # 0: layers have no embeddings of their own (Gemma 4)
    "interleave_moe_layer_step": (1, LAYERS),
    **dict.fromkeys(("num_kv_shared_layers", "altup_active_idx"), (0, LAYERS)),
    **dict.fromkeys(("altup_num_inputs", "hc_mult", "hc_count"), (1, STREAMS)),
    **dict.fromkeys(("hc_sinkhorn_iters", "index_kpool"), (1, LAYERS)),
    **dict.fromkeys(("mamba_num_heads", "hidden_size_per_head", "mamba_d_state"), (1, PARTS)),
    **dict.fromkeys(("n_groups", "mamba_ngroups", "n_mamba_heads", "mamba_headdim"), (1, PARTS)),
    **dict.fromkeys(("mamba_step", "mamba_d_conv"), (1, LAYERS)),
    "attention_hidden_size": (1, FEATURES),
    **dict.fromkeys(("attention_window_size", "model_max_length"), (1, MAX_INT32)),
    "num_nextn_predict_layers": (0, LAYERS),
    "moe_shared_expert_intermediate_size": (0, FEATURES),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (0, LAYERS)),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), (1, LAYERS)),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), (1, PARTS)),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), (1, PARTS)),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), (1, PARTS)),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), (1, FEATURES)),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), (1, MAX_INT32)),
    "num_mel_bins": (1, 200),
    **dict.fromkeys(("index_block_size", "index_topk_blocks"), (1, MAX_INT32)),
    **dict.fromkeys(("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by"), (1, MAX_INT32)),
    **dict.fromkeys(("heads_per_ngram", "ngram_size", "ple_conv_kernel_size"), (1, 64)),
    **dict.fromkeys(("split_ngram_parts", "hc_lowrank"), (1, FEATURES)),
    "max_relative_positions": (-1, 2**20),
    **dict.fromkeys((f"{name}_low_rank_dim" for name in ("decay", "a", "v", "gate")), (1, FEATURES)),
}
BY_LAYER = ("intermediate_size", "moe_intermediate_size")  # which of these may be a list, with a number for each layer
PATTERN_ENTRIES = {"sliding_window_pattern": "LG"}  # which may be text, of a letter for each layer in turn (EXAONE)
# Of numbers that need not be whole, likewise.
FLOAT_ENTRIES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), (1e-3, 1e18)),
    "factor": (1e-6, 1e6),
    "partial_rotary_factor": (1e-3, 1.0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), (0.0, 1.0)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (1e-6, 1e9)),
    **dict.fromkeys(("logits_scaling", "clip_qkv"), (1e-6, 1e9)),
    "logit_scale": (-1e9, 1e9),
    "layernorm_epsilon": (0.0, 1.0),
    **dict.fromkeys(("rope_ratio", "hidden_ratio"), (1e-3, 1e6)),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier"), (-1e9, 1e9)),
}
LISTS: Mapping[str, type] = {
    "architectures": str,
    "layer_types": str,
    "mlp_only_layers": int,
    "no_rope_layers": int,
    "moe_layers": int,
    "full_attention_idx": int,
    "hybrid_layer_ids": int,
    **dict.fromkeys(("bskcn_1", "bskcn_2", "bskcn_3", "bskcn_4"), int),
}
STRING_ENTRIES = ("rope_type", "hidden_act", "hidden_activation", "activation_function")
OBJECTS = ("rope_parameters", "rope_scaling", "text_config", "quantization_config", "compression_config")
OMNI = {"NemotronH_Omni_Reasoning_V3": "nemotron_h_omni"}
# classes that have a head, whatever they are called -> their family
CLASS_FAMILIES = {
    "ChatGLMModel": "chatglm", "TeleChat2ForCausalLM": "telechat", "BailingMoeV2ForCausalLM": "bailing_moe",
    "DeciLMForCausalLM": "nemotron_nas", "Rnj1ForCausalLM": "gemma3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3_vl_text", "HCXVisionV2ForCausalLM": "hyperclovax_vision_v2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl", **OMNI,
}  # fmt: skip
# model types -> those whose class transformers computes them by
SHARED_CLASSES = {"glmga": "glm46v", "inkling_mm_model": "inkling"}
# how classes with a head are called; MarianMTModel translates
GENERATIVE_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")
# in lower case: what names of classes of draft heads hold
HEAD_NAMES = ("eagle", "dflash", "dspark", "xpress")
REMEDY = "correct it, or fetch the model anew"


def check_entries(raw: Mapping[str, Any], source: str) -> None:
    """ValueError names the first entry that no model has. null passes: what it stands for is the class's to say."""
    for where, entries in _objects(raw, ""):
        for name, value in entries.items():
            wanted = None if value is None else _wanted(name, value)
            if wanted is not None and not _is_unused(name, entries):
                raise ValueError(f"{source}: {where}{name} is {reprlib.repr(value)}, not {wanted}; {REMEDY}")


def _is_unused(name: str, entries: Mapping[str, Any]) -> bool:
    """Returns whether another entry says that nothing is computed with this one."""
    if name == "head_dim":  # of latent attention without positions, its features that are turned (GLM-5-Next)
        return type(entries[name]) is int and entries[name] == entries.get("qk_rope_head_dim") == 0
    listed = entries.get("model_type") == "plamo3" and isinstance(entries[name], list)  # which its adapter checks
    return name == "sliding_window" and (entries.get("use_sliding_window") is False or listed)


def _objects(entries: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The entries, those of a wrapper's parts, and the rotary ones, which may be kept by kind of layer."""
    yield where, entries
    for name, value in entries.items():
        inside = name.endswith("_config") or name.startswith("rope_") or "rope_" in where
        if inside and name != "quantization_config" and isinstance(value, Mapping):
            yield from _objects(value, f"{where}{name}.")


def _wanted(name: str, value: Any) -> str | None:
    """Returns what the entry should be; None if it is valid."""
    if name in INTEGER_ENTRIES:
        low, high = INTEGER_ENTRIES[name]
        if isinstance(value, str) and value and {*value} <= {*PATTERN_ENTRIES.get(name, "")}:
            return None
        each = value if name in BY_LAYER and isinstance(value, list) and 0 < len(value) <= LAYERS else [value]
        fits = all(type(number) is int and low <= number <= high for number in each)
        return None if fits else f"a whole number from {low} to {high}"
    if name in FLOAT_ENTRIES:
        least, most = FLOAT_ENTRIES[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if number and least <= value <= most else f"a number from {least:g} to {most:g}"
    if name in LISTS:
        kind = LISTS[name]
        fits = isinstance(value, list) and len(value) <= LAYERS and all(isinstance(each, kind) for each in value)
        return None if fits else f"a list of {'names' if kind is str else 'whole numbers'}"
    if name in OBJECTS:
        return None if isinstance(value, Mapping) else "an object"
    return "text" if name in STRING_ENTRIES and not isinstance(value, str) else None


def check_shape(config: Any, source: str) -> None:
    """Checks the numbers of a text model against each other; ValueError names those that do not fit together."""
    heads, kv_heads, hidden, chosen = (
        getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "num_experts_per_tok")
    )
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}, which they "
            f"share evenly; {REMEDY}"
        )
    if heads and hidden and hidden % heads and not getattr(config, "head_dim", None):
        raise ValueError(
            f"{source}: hidden_size is {hidden}, no multiple of num_attention_heads, {heads}, and no head_dim is "
            f"given; {REMEDY}"
        )
    layers = getattr(config, "num_hidden_layers", None) or 0
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_topk"):
        value = getattr(config, name, None)
        if isinstance(value, list) and len(value) < layers:
            raise ValueError(f"{source}: {name} names {len(value)} of {layers} layers (num_hidden_layers); {REMEDY}")
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    each = chosen if isinstance(chosen, list) else [] if chosen is None else [chosen]  # Hunyuan's may differ by layer
    if experts and not all(isinstance(number, int) and 1 <= number <= experts for number in each):
        raise ValueError(
            f"{source}: num_experts_per_tok is {chosen}, not from 1 to the {experts} experts that there are; {REMEDY}"
        )


def check_architectures(kind: str, architectures: list[str] | None, source: str) -> None:
    """ValueError where the file names classes, and none of them is the family's that generates text."""
    family = built_in(kind)
    if not architectures or family is None or added_for(kind, architectures):  # what is added has names of its own
        return
    names = ", ".join(map(repr, architectures[:3]))
    known = (kind, kind.removesuffix("_text"), SHARED_CLASSES.get(kind, kind), family)
    heads = [name for name in architectures if name.endswith(GENERATIVE_SUFFIXES) or CLASS_FAMILIES.get(name) == family]
    if names_head(architectures):
        why = "which is a draft head, for speculative_config.model"
    elif not heads:
        why = "which is no class that generates text: its head, or the lack of one, is not computed here"
    elif all(_family_of(name) not in map(_comparable_name, known) for name in heads):
        why = f"which is another model than its model_type, {kind!r}"
    else:
        return
    raise ValueError(
        f"{source}: architectures is {names}, {why}; choose a model for text generation, or set architectures to null "
        "with hf_overrides if you know better"
    )


def names_head(architectures: Any) -> bool:
    """Returns whether the first class that a file names is that of a draft head."""
    first = str(architectures[0]).lower() if isinstance(architectures, list) and architectures else ""
    return any(name in first for name in HEAD_NAMES)


def _family_of(name: str) -> str:
    """LlamaForCausalLM -> llama."""
    if name in CLASS_FAMILIES:
        return _comparable_name(CLASS_FAMILIES[name])
    for end in GENERATIVE_SUFFIXES:
        name = name.removesuffix(end)
    return _comparable_name(name)


def _comparable_name(name: str) -> str:
    """v1 stands in the middle of Hunyuan's model types, and at the end of its classes."""
    return name.lower().replace("_", "").replace("-", "").replace("v1", "")
