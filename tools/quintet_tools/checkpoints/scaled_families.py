"""Families that differ from those of transformers in names and a few numbers: references, and small configs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.harness.reference_model import LENGTH, VOCAB
from quintet_tools.checkpoints.layered_families import LAYERED_VARIANTS
from quintet_tools.checkpoints.published import QKV, Published, Settings, Tensors, fused, open_shared, renamed, stacked
from quintet_tools.checkpoints.sizes import LATENT, PLAIN


def _as_they_are(tensors: Tensors, settings: Settings) -> Tensors:
    return tensors


def _scores(settings: Settings) -> float:
    return float((settings["hidden_size"] // settings["num_attention_heads"]) ** -0.5)


# ---------------------------------------------------------------------------------------------- scaled as Granite


def _minicpm_config(settings: Settings) -> dict[str, Any]:
    """One expert of one is a feed-forward."""
    return {
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
        **settings,
        "embedding_multiplier": settings["scale_emb"],
        "residual_multiplier": settings["scale_depth"] / math.sqrt(settings["num_hidden_layers"]),
        "attention_multiplier": _scores(settings),
        "logits_scaling": settings["hidden_size"] / settings["dim_model_base"],
        **({"num_local_experts": settings["num_experts"]} if "num_experts" in settings else {}),
    }


def _minicpm(tensors: Tensors, settings: Settings) -> Tensors:
    """Stacks of transformers [E, 2 I, D] and [E, D, I], apart."""
    made = {}
    for name, tensor in tensors.items():
        parent, _, rest = name.partition(".block_sparse_moe.")
        if not rest:
            made[name] = tensor
        elif rest.startswith("router"):
            made[f"{parent}.mlp.gate.weight"] = tensor
        else:
            for expert, stack in enumerate(tensor):
                parts = {"w1": stack.chunk(2)[0], "w3": stack.chunk(2)[1]} if "input" in rest else {"w2": stack}
                made |= {f"{parent}.mlp.experts.{expert}.{each}.weight": part for each, part in parts.items()}
    if "num_experts" in settings:
        return made
    names = {r"experts\.0\.w1": "gate_proj", r"experts\.0\.w3": "up_proj", r"experts\.0\.w2": "down_proj"}
    return {name: tensor for name, tensor in renamed(made, names).items() if ".mlp.gate." not in name}


def _teleflm_config(settings: Settings) -> dict[str, Any]:
    plain = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    scaled = {
        "embedding_multiplier": settings.get("input_mult", 1.0),
        "logits_scaling": settings.get("mup_scale_factor", 1.0) / settings.get("output_mult", 1.0),
    }
    return {**plain, **settings, "attention_multiplier": _scores(settings), **(scaled if settings["use_mup"] else {})}


# ------------------------------------------------------------------------------------------------- Llama's blocks


def _orion_config(settings: Settings) -> dict[str, Any]:
    parallel = {"use_parallel_residual": False, "qk_layernorm": False, "use_qkv_bias": False}
    return {**settings, **parallel, "layer_norm_eps": settings["rms_norm_eps"], "partial_rotary_factor": 1.0}


def _pangu_config(settings: Settings) -> dict[str, Any]:
    return {"rope_theta": 16000000.0, "rms_norm_eps": 1e-5, **settings, "attention_bias": settings["bias"]}


def _telechat_config(settings: Settings) -> dict[str, Any]:
    return {
        **settings,
        "num_hidden_layers": settings["n_layer"],
        "num_attention_heads": settings["n_head"],
        "intermediate_size": settings["ffn_hidden_size"],
        "rms_norm_eps": settings["layer_norm_epsilon"],
        "max_position_embeddings": settings["seq_length"],
        "attention_bias": True,
        "mlp_bias": True,
    }


INNER = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "gate_proj.bias", "up_proj.bias")


def _telechat(tensors: Tensors, settings: Settings) -> Tensors:
    """k of a head over v of it, head by head."""
    size = settings["hidden_size"] // settings["n_head"]

    def join(k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([each.unflatten(0, (-1, size)) for each in (k, v)], 1).flatten(0, 2)

    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(INNER)}
    names = {
        r"^model\.embed_tokens": "transformer.word_embeddings",
        r"^model\.norm": "transformer.ln_f",
        r"^model\.layers": "transformer.h",
        r"self_attn\.q_proj": "self_attn.query",
        r"self_attn\.o_proj": "self_attn.dense",
        r"self_attn": "self_attention",
    }
    return renamed(fused(kept, ("k_proj", "v_proj"), "key_value", join), names)


def _telechat_computes(model: Any, settings: Settings) -> Any:
    for name, parameter in model.named_parameters():
        if name.endswith(INNER):
            parameter.data.zero_()
    return model


def _telechat3_config(settings: Settings) -> dict[str, Any]:
    """YaRN with 0.07 log(factor) + 1 on cosines and sines."""
    rope = settings.get("rope_scaling")
    if rope is None:
        return dict(settings)
    factor = 0.07 * math.log(rope["factor"]) + 1.0
    return {**settings, "rope_scaling": {**rope, "rope_type": "yarn", "attention_factor": factor}}


# ------------------------------------------------------------------------------------------------------- experts


def _deepseek_config(settings: Settings) -> dict[str, Any]:
    return {
        **settings,
        "num_experts": settings["n_routed_experts"],
        "shared_expert_intermediate_size": settings["moe_intermediate_size"] * settings["n_shared_experts"],
        "mlp_only_layers": list(range(settings["first_k_dense_replace"])),
        "qkv_bias": False,
    }


def _deepseek(tensors: Tensors, settings: Settings) -> Tensors:
    named = renamed(tensors, {r"shared_expert\.": "shared_experts."})
    return {name: tensor for name, tensor in named.items() if "shared_expert_gate" not in name}


def _ling_config(settings: Settings) -> dict[str, Any]:
    return {
        "partial_rotary_factor": 1.0,
        **settings,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": settings.get("num_shared_experts", 1),
        "use_qk_norm": True,
    }


def _sarvam_moe_config(settings: Settings) -> dict[str, Any]:
    return {"routed_scaling_factor": 2.5, **_ling_config(settings)}


def ling_tensors(tensors: Tensors, settings: Settings) -> Tensors:
    """By the names of Ling's files, q, k and v fused."""
    names = {
        r"^model\.embed_tokens": "model.word_embeddings",
        r"self_attn\.o_proj": "attention.dense",
        r"self_attn\.q_norm": "attention.query_layernorm",
        r"self_attn\.k_norm": "attention.key_layernorm",
        r"self_attn": "attention",
        r"shared_expert\.": "shared_experts.",
        r"gate\.e_score_correction_bias": "gate.expert_bias",
    }
    named = renamed(fused(tensors, QKV, "query_key_value", stacked), names)
    return {name: tensor for name, tensor in named.items() if "shared_expert_gate" not in name}


def _sarvam_config(settings: Settings) -> dict[str, Any]:
    made = {name: value for name, value in settings.items() if name not in ("num_experts", "head_dim")}
    rope = {**settings["rope_scaling"], "rope_type": "yarn"}
    return {
        **made,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": settings["num_shared_experts"],
        "rope_scaling": rope,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    }


SCALED: Mapping[str, Published] = {
    "PanguEmbedded": Published("PanguEmbeddedForCausalLM", "llama", _pangu_config, _as_they_are),
    "TeleFLM": Published("TeleFLMForCausalLM", "granite", _teleflm_config, _as_they_are),
    "deepseek": Published(
        "DeepseekForCausalLM", "qwen2_moe", _deepseek_config, _deepseek, open_shared, "its shared expert ungated"
    ),
    "minicpm": Published("MiniCPMForCausalLM", "granitemoe", _minicpm_config, _minicpm),
    "orion": Published("OrionForCausalLM", "stablelm", _orion_config, _as_they_are),
    "param2moe": Published("Param2MoEForCausalLM", "glm4_moe", _ling_config, ling_tensors),
    "sarvam_mla": Published("SarvamMLAForCausalLM", "deepseek_v3", _sarvam_config, _as_they_are),
    "sarvam_moe": Published("SarvamMoEForCausalLM", "glm4_moe", _sarvam_moe_config, ling_tensors),
    "telechat": Published(
        "TeleChat2ForCausalLM", "llama", _telechat_config, _telechat, _telechat_computes, "some of its biases 0"
    ),
    "telechat3": Published("TeleChat3ForCausalLM", "llama", _telechat3_config, _as_they_are),
}

MINICPM = {**PLAIN, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
TELECHAT = {
    "vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 4, "ffn_hidden_size": 77, "seq_length": LENGTH,
    "training_seqlen": LENGTH, "base_seqlen": LENGTH, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 61,
    "first_k_dense_replace": 1, "norm_topk_prob": False,
}  # fmt: skip
SARVAM = {
    "num_experts": 8, "num_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 61, "head_dim": 16,
    "rope_theta": 8000.0,
}  # fmt: skip
DEEP_YARN = {
    "type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
# family -> variant -> what its config is made of
SCALED_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **LAYERED_VARIANTS,
    "PanguEmbedded": {"plain": {**PLAIN, "bias": True}},
    "TeleFLM": {
        "muP": {**PLAIN, "use_mup": True, "input_mult": 2.0, "output_mult": 3.0, "mup_scale_factor": 2.0},
        "plain": {**PLAIN, "use_mup": False},
    },
    "deepseek": {"plain": {**PLAIN, **DEEPSEEK}},
    "minicpm": {
        "plain": {**MINICPM, "tie_word_embeddings": True},
        "experts": {**MINICPM, "num_experts": 4, "num_experts_per_tok": 2},
    },
    "orion": {"plain": {**PLAIN, "rms_norm_eps": 1e-5}},
    "param2moe": {
        "plain": {
            **PLAIN,
            **SARVAM,
            "num_shared_experts": 2,
            "moe_shared_expert_intermediate_size": 122,
            "n_group": 1,
        },  # fmt: skip
    },
    "sarvam_mla": {
        "plain": {
            **PLAIN,
            **{name: LATENT[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
            **SARVAM,
            "head_dim": LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"],
            "num_key_value_heads": PLAIN["num_attention_heads"],
            "q_lora_rank": None,
            "rope_scaling": DEEP_YARN,
        },
    },
    "sarvam_moe": {"plain": {**PLAIN, **SARVAM}},
    "telechat": {"plain": TELECHAT, "fewer KV heads": {**TELECHAT, "num_key_value_heads": 2}},
    "telechat3": {
        "plain": {**PLAIN, "head_dim": 12},
        "its YaRN": {
            **PLAIN,
            "head_dim": 12,
            "rope_scaling": {"rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    },
}
