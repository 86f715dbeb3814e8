"""Gemma's families: norms multiply by 1 + w, which the files hold."""

import math
from collections.abc import Mapping
from dataclasses import replace

from quintet.gguf.architectures.architecture import COMMON, Architecture, Entries, experts, windows
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import GEMMA, LLAMA, SANDWICH
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ENDS, ArchitectureNames, Computed
from quintet.gguf.pooling import DENSE_WEIGHTS


def _gemma(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model)}


def _gemma2(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": rope(model),
        "query_pre_attn_scalar": _query_scale(model, 46),
        "sliding_window": model.required_number("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _gemma3(model: GGUFModel) -> Entries:
    local = model.number("rope.freq_base_swa", 10000.0)
    window, capped = model.window, model.get("final_logit_softcapping")
    kinds = ["full_attention" if not window or not (i + 1) % 6 else "sliding_attention" for i in range(model.layers)]
    return {
        "rope_parameters": {
            "full_attention": rope(model, base=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scale(model, 62),
        "layer_types": kinds,
        "sliding_window": window or 4096,
        "final_logit_softcapping": None if capped is None else model.number("final_logit_softcapping"),
    }


def _gemma_embedding(model: GGUFModel) -> Entries:
    """EmbeddingGemma: tokens see both ways, and a window is for both sides together."""
    entries = {**_gemma3(model), **windows(model, every=6)}
    return {**entries, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}


def _gemma3n(model: GGUFModel) -> Entries:
    """The file has what activations are cut at, in deviations from their mean; the config the share that is cut."""
    cuts = model.per_layer("activation_sparsity_scale", -math.inf)
    streams = model.required_number("altup.num_inputs")
    if streams != STREAMS:
        raise ValueError(f"{model.path}: altup.num_inputs is {streams}, and files of {STREAMS} are read")
    return {
        **windows(model, every=5),
        "rope_parameters": {
            "full_attention": rope(model, base=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 1e4)},
        },
        "activation_sparsity_pattern": [round(0.5 * (1 + math.erf(each / math.sqrt(2))), 6) for each in cuts],
        "num_kv_shared_layers": model.count("attention.shared_kv_layers"),
        "vocab_size_per_layer_input": model.shape("per_layer_token_embd.weight")[0],
        "hidden_size_per_layer_input": model.required_number("embedding_length_per_layer_input"),
        "altup_active_idx": model.count("altup.active_idx"),
        "altup_num_inputs": streams,
        "laurel_rank": model.shape("blk.0.laurel_l.weight")[0],
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _gemma4(model: GGUFModel) -> Entries:
    """Layers that see all may have other heads than windowed ones, and no values of their own: their keys' instead."""
    seen, heads = windows(model), model.per_layer("attention.head_count_kv", model.heads)
    kinds, widths = seen["layer_types"], model.per_layer("feed_forward_length", 0)
    heads_of, full = dict(zip(kinds, heads, strict=True)), [i for i, kind in enumerate(kinds) if "full" in kind]
    entries = {
        **seen,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": heads_of.get("sliding_attention", heads[0]),
        "num_global_key_value_heads": heads_of.get("full_attention"),
        "attention_k_eq_v": bool(full) and not model.has(f"blk.{full[0]}.attn_v.weight"),
        "head_dim": model.required_number("attention.key_length_swa", model.head_dim),
        "global_head_dim": model.head_dim,
        "rope_parameters": {
            "full_attention": _proportional(model),
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 1e4)},
        },
        "num_kv_shared_layers": model.count("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": model.count("embedding_length_per_layer_input"),
        "final_logit_softcapping": model.get("final_logit_softcapping"),
    }
    if entries["hidden_size_per_layer_input"]:
        entries["vocab_size_per_layer_input"] = model.shape("per_layer_token_embd.weight")[0]
    if model.count("expert_count"):
        inner = model.required_number("expert_feed_forward_length")
        entries |= {"enable_moe_block": True, "moe_intermediate_size": inner, **experts(model, used="top_k_experts")}
    return entries


def _proportional(model: GGUFModel) -> Entries:
    """Rotary positions of the first features of a head, at the speeds of all: large divisors stop the others."""
    divisors = model.floats("rope_freqs.weight", model.head_dim // 2) or [1.0] * (model.head_dim // 2)
    turned = [each for each in divisors if each == 1.0]
    if not turned or divisors[: len(turned)] != turned or min(divisors[len(turned) :], default=STOPPED) < STOPPED:
        raise ValueError(f"{model.path}: rope_freqs.weight is not 1 first and {STOPPED:g} behind it; fetch it again")
    share = len(turned) / len(divisors)
    theta = model.number("rope.freq_base", 1e6)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _query_scale(model: GGUFModel, deepest: int) -> float:
    """Returns the number that scores are divided by the root of: no entry has it, and the deepest Gemma has its own."""
    whole = model.required_number("block_count") == deepest
    return model.required_number("embedding_length") // model.heads if whole else model.head_dim


STREAMS = 4  # of AltUp, which the converter's files have
STOPPED = 1e29  # a divisor that stops a rotation; the converter writes 1e30
_BY_LAYER = ("feed_forward_length", "attention.head_count_kv")  # numbers that may differ between layers
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
}  # fmt: skip
_PER_LAYER_ENDS = {
    **ENDS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_STREAMS = {
    **LLAMA, **SANDWICH, **_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
_GEMMA3N = ArchitectureNames(
    _STREAMS,
    _PER_LAYER_ENDS,
    computed={
        "altup.correct_output_scale": Computed("same", ("altup_correct_scale.weight",)),
        **{
            f"/model.altup_{name}.{index}.weight": Computed(f"part {index}", (f"{source}.weight",))
            for name, source in (("projections", "altup_proj"), ("unembed_projections", "altup_unembd_proj"))
            for index in range(STREAMS - 1)
        },
    },
)

_GEMMA4 = ArchitectureNames(
    {
        **LLAMA, **SANDWICH, **_PER_LAYER,
        "ffn_gate_exps": "experts.gate_proj", "ffn_up_exps": "experts.up_proj", "ffn_down_exps": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2", "ffn_gate_inp": "router.proj",
    },
    _PER_LAYER_ENDS,
    computed={
        "layer_scalar": Computed("same", ("layer_output_scale.weight",)),
        "router.scale": Computed("same", ("ffn_gate_inp.scale",)),
        "router.per_expert_scale": Computed("same", ("ffn_down_exps.scale",)),
    },
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", ArchitectureNames(LLAMA, offset=1.0), _gemma, dtype="bfloat16"),
    "gemma2": Architecture("gemma2", GEMMA, _gemma2, dtype="bfloat16"),
    "gemma3n": Architecture("gemma3n_text", _GEMMA3N, _gemma3n, dtype="bfloat16"),
    "gemma3": Architecture("gemma3_text", GEMMA, _gemma3, dtype="bfloat16"),
    "gemma-embedding": Architecture(
        "gemma3_text", replace(GEMMA, computed=DENSE_WEIGHTS), _gemma_embedding, dtype="bfloat16"
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _GEMMA4,
        _gemma4,
        {key: name for key, name in COMMON.items() if key not in _BY_LAYER},
        dtype="bfloat16",
        has_head_dim=False,
    ),
}
