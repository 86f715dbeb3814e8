"""Families with layers that transformers' nearest class does not have: that class's modules, put together anew."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from quintet_tools.checkpoints.published import QKV, Published, Settings, Tensors, fused, renamed, stacked
from quintet_tools.checkpoints.sizes import LATENT, PLAIN, WINDOW

# ------------------------------------------------------------------------------------------------------ Nemotron NAS


class NoBranch(nn.Module):
    """In the place of a branch: what is added is 0."""

    def __init__(self, several: bool) -> None:
        super().__init__()
        self._several = several

    def forward(self, x: Tensor | None = None, **given: Any) -> Any:
        zeros = torch.zeros_like(given["hidden_states"] if x is None else x)
        return (zeros, None) if self._several else zeros


NAS_WORDS = "Llama's modules of transformers, by layer (`tools/quintet_tools/checkpoints/layered_families.py`)"


def _nas_model(settings: Settings) -> Any:
    """A Llama of transformers whose layers have heads and widths of their own."""
    blocks = settings["block_configs"]
    entries = {name: value for name, value in settings.items() if name not in ("block_configs", "intermediate_size")}
    config = LlamaConfig(**{"attn_implementation": "eager", **entries})
    model = LlamaForCausalLM(config)
    for index, (layer, block) in enumerate(zip(model.model.layers, blocks, strict=True)):
        attention, ffn, own = block["attention"], block["ffn"], copy.deepcopy(config)
        layer.self_attn, layer.mlp = NoBranch(True), NoBranch(False)
        if not attention.get("no_op"):
            own.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
            layer.self_attn = LlamaAttention(own, index)
        if not ffn.get("no_op"):
            # 2 / 3 of 20 x 48, rounded up to a multiple of 256
            own.intermediate_size = 768 if "ffn_mult" in ffn else ffn["intermediate_size"]
            layer.mlp = LlamaMLP(own)
    return model


def _nas(tensors: Tensors, settings: Settings) -> Tensors:
    """Without norms of branches that are not there."""
    lacking = set()
    for index, block in enumerate(settings["block_configs"]):
        for branch, norm in (("attention", "input_layernorm"), ("ffn", "post_attention_layernorm")):
            if block[branch].get("no_op"):
                lacking.add(f"model.layers.{index}.{norm}.weight")
    return {name: tensor for name, tensor in tensors.items() if name not in lacking}


# ----------------------------------------------------------------------------------------------------------- Plamo 3


def _plamo3_config(settings: Settings) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    if settings.get("rope_scaling_factor", 1) != 1:
        rope |= {"rope_type": "yarn", "factor": settings["rope_scaling_factor"], "truncate": False}
        rope |= {"original_max_position_embeddings": settings["initial_context_length"]}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0}
    pattern = settings["sliding_window_pattern"]
    return {
        **{name: value for name, value in settings.items() if name not in ("rope_theta", "sliding_window_pattern")},
        "hidden_activation": "silu",
        "query_pre_attn_scalar": settings["head_dim"],
        "sliding_window": settings["window_size"],
        "layer_types": [
            "sliding_attention" if (index + 1) % pattern else "full_attention"
            for index in range(settings["num_hidden_layers"])
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": settings["rope_local_theta"]},
        },
    }


POST_NORMS = {"post_mixer_norm": 1 / 5, "post_mlp_norm": 1 / 5**1.5}  # what their weights are kept around


def _plamo3(tensors: Tensors, settings: Settings) -> Tensors:
    """Gemma keeps all norms around 1."""
    names = {
        r"^model\.layers": "model.layers.layers",
        r"self_attn": "mixer",
        r"input_layernorm": "pre_mixer_norm",
        r"post_attention_layernorm": "post_mixer_norm",
        r"pre_feedforward_layernorm": "pre_mlp_norm",
        r"post_feedforward_layernorm": "post_mlp_norm",
    }
    joined = fused(fused(tensors, QKV, "qkv_proj", stacked), ("gate_proj", "up_proj"), "gate_up_proj", stacked)
    found = renamed(joined, names)
    for name in found:
        around = next((value for norm, value in POST_NORMS.items() if norm in name), 1.0)
        found[name] = found[name] + (1 - around)
    return found


def _plamo3_computes(model: Any, settings: Settings) -> Any:
    """Embeddings are not scaled; a YaRN of one kind of layers reads `truncate`, as that of a whole model does."""
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)
    rope = model.config.rope_parameters["full_attention"]
    if rope["rope_type"] == "yarn":
        lengths = {"max_position_embeddings": settings["max_position_embeddings"], "head_dim": settings["head_dim"]}
        whole = LlamaConfig(**lengths, rope_parameters=rope)
        frequencies, _ = ROPE_INIT_FUNCTIONS["yarn"](whole, None)
        model.model.rotary_emb.full_attention_inv_freq = frequencies
    return model


# ------------------------------------------------------------------------------------------------- openPangu Ultra MoE

OUTER = ("post_attention_layernorm", "post_mlp_layernorm")


def _outer_norm(index: int, which: str, size: int) -> Tensor:
    """The weight of a norm that transformers' layer lacks."""
    return 1 + 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(2 * index + OUTER.index(which)))


class Normed(nn.Module):
    """A branch and the norm behind it."""

    def __init__(self, branch: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.branch, self.norm = branch, norm

    def forward(self, *given: Any, **named: Any) -> Any:
        made = self.branch(*given, **named)
        return (self.norm(made[0]), *made[1:]) if isinstance(made, tuple) else self.norm(made)


def _pangu_config(settings: Settings) -> dict[str, Any]:
    return {**settings, "n_group": 1, "topk_group": 1}


def _pangu(tensors: Tensors, settings: Settings) -> Tensors:
    found = renamed(tensors, {r"post_attention_layernorm": "pre_mlp_layernorm"} if settings["sandwich_norm"] else {})
    if settings["sandwich_norm"]:
        for index in range(settings["num_hidden_layers"]):
            for which in OUTER:
                found[f"model.layers.{index}.{which}.weight"] = _outer_norm(index, which, settings["hidden_size"])
    biased = settings["router_enable_expert_bias"]
    return {name: each for name, each in found.items() if biased or "e_score_correction_bias" not in name}


def _pangu_computes(model: Any, settings: Settings) -> Any:
    for index, layer in enumerate(model.model.layers):
        if not settings["router_enable_expert_bias"] and hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.zero_()
        if settings["sandwich_norm"]:
            norms = [copy.deepcopy(layer.input_layernorm) for _ in OUTER]
            for norm, which in zip(norms, OUTER, strict=True):
                norm.weight.data = _outer_norm(index, which, settings["hidden_size"])
            layer.self_attn, layer.mlp = Normed(layer.self_attn, norms[0]), Normed(layer.mlp, norms[1])
    return model


LAYERED: Mapping[str, Published] = {
    "nemotron-nas": Published("DeciLMForCausalLM", "", dict, _nas, own=_nas_model, words=NAS_WORDS),
    "pangu_ultra_moe": Published(
        "PanguUltraMoEForCausalLM",
        "deepseek_v3",
        _pangu_config,
        _pangu,
        _pangu_computes,
        "with norms behind its branches",
    ),
    "plamo3": Published(
        "Plamo3ForCausalLM", "gemma3_text", _plamo3_config, _plamo3, _plamo3_computes, "its embeddings not scaled"
    ),
}

NAS = {name: value for name, value in PLAIN.items() if name not in ("num_key_value_heads", "intermediate_size")}
NO_OP = {"no_op": True}
NAS_BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 20.0, "no_op": False}},
    {"attention": NO_OP, "ffn": {"intermediate_size": 77}},
    {"attention": {"n_heads_in_group": 3, "window_length": None}, "ffn": NO_OP},
    {"attention": NO_OP, "ffn": NO_OP},
]
PANGU = {
    **PLAIN,
    **{name: value for name, value in LATENT.items() if name not in ("n_group", "topk_group")},
    "sandwich_norm": True,
    "router_enable_expert_bias": True,
}
PLAMO3 = {
    **PLAIN, "head_dim": 16, "sliding_window_pattern": 2, "window_size": WINDOW, "rope_theta": 50000.0,
    "rope_local_theta": 10000.0, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
# family -> variant -> what its config is made of
LAYERED_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "nemotron-nas": {"plain": {**NAS, "num_hidden_layers": 4, "block_configs": NAS_BLOCKS}},
    "pangu_ultra_moe": {
        "plain": PANGU,
        "no bias, one norm": {**PANGU, "sandwich_norm": False, "router_enable_expert_bias": False},
    },
    "plamo3": {
        "plain": PLAMO3,
        "scaled, tied": {
            **PLAMO3,
            "tie_word_embeddings": True,
            "rope_scaling_factor": 4.0,
            "initial_context_length": 64,
        },
    },
}
