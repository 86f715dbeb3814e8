"""Families with one feed-forward in a layer, neither Llama's nor GPT-2's."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import (
    RMS_EPS,
    SIZES,
    Architecture,
    Entries,
    layer_norms,
    query_bias,
    windows,
)
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import LLAMA, PERMUTED, SANDWICHED
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Joined


def _cohere(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": rope(model),
        "attention_bias": query_bias(model),
        "logit_scale": model.number("logit_scale"),
    }


def _command_r(model: GGUFModel) -> Entries:
    return _cohere(model) | {"use_qk_norm": model.has("blk.0.attn_q_norm.weight")}


def _cohere2(model: GGUFModel) -> Entries:
    """Each fourth layer sees everything, as llama.cpp has it too."""
    return _cohere(model) | windows(model, every=4)


def _chatglm(model: GGUFModel) -> Entries:
    """The file has the fields of the published code."""
    shape = dict.fromkeys(("rmsnorm", "original_rope", "post_layer_norm", "multi_query_attention"), True)
    return {
        **shape,
        "padded_vocab_size": model.shape("token_embd.weight")[0],
        "kv_channels": model.head_dim,
        "rope_ratio": model.number("rope.freq_base", 1e4) / 1e4,
        "add_qkv_bias": query_bias(model),
        "add_bias_linear": False,
    }


def _exaone(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "activation_function": "silu"}


def _jais2(model: GGUFModel) -> Entries:
    biased = {"attention_bias": query_bias(model), "mlp_bias": model.has("blk.0.ffn_up.bias")}
    return {"rope_parameters": rope(model), **biased}


def _internlm2(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "bias": query_bias(model)}


def _exaone4(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), **windows(model)}


def _glm4(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model, partial=True), "attention_bias": query_bias(model)}


def _nemotron(model: GGUFModel) -> Entries:
    biased = {"attention_bias": query_bias(model), "mlp_bias": model.has("blk.0.ffn_up.bias")}
    return {"rope_parameters": rope(model, partial=True), **biased}


def _olmo(model: GGUFModel) -> Entries:
    clip = model.get("attention.clamp_kqv")
    return {
        "rope_parameters": rope(model),
        "attention_bias": False,
        "clip_qkv": None if clip is None else model.number("attention.clamp_kqv"),
    }


def _olmo2(model: GGUFModel) -> Entries:
    """OLMo 3 has windows; positions of windowed layers are not scaled."""
    turned = rope(model)
    if not model.window:
        return {"rope_parameters": turned, "attention_bias": False}
    local = {"rope_type": "default", "rope_theta": turned["rope_theta"]}
    kinds = {"full_attention": turned, "sliding_attention": local}
    return {"rope_parameters": kinds, "attention_bias": False, **windows(model, every=4)}


def _phi3(model: GGUFModel) -> Entries:
    length = model.required_number("context_length")
    return {
        "rope_parameters": rope(model, partial=True),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length", length),
        "sliding_window": model.window,
    }


def _stablelm(model: GGUFModel) -> Entries:
    if model.in_any_layer("attn_q_norm.weight"):
        raise ValueError(f"{model.path} is of StableLM 2 12B, whose norms of heads quintet does not read from GGUF")
    return {
        "rope_parameters": rope(model, partial=True),
        "use_qkv_bias": query_bias(model),
        "use_parallel_residual": not model.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": False,
    }


def _starcoder2(model: GGUFModel) -> Entries:
    """Entries without windows, as llama.cpp computes it."""
    return {"rope_parameters": rope(model), "use_bias": query_bias(model), "sliding_window": model.window}


def _hunyuan(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model), "attention_bias": query_bias(model)}


def _bitnet(model: GGUFModel) -> Entries:
    """Entries with llama.cpp's activation: BitNet b1.58 3B's."""
    return {"rope_parameters": rope(model), "hidden_act": "silu"}


_BITNET = {**LLAMA, "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
_PHI3 = ArchitectureNames({**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}

_CHATGLM = {
    **{name: LLAMA[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
    "attn_qkv": "self_attn.query_key_value",
    "ffn_up": "mlp.gate_up_proj",
}
_CHATGLM_SIZES = {
    "context_length": "seq_length", "block_count": "num_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "ffn_hidden_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "multi_query_group_num", RMS_EPS: "layernorm_epsilon",
}  # fmt: skip
_EXAONE_SIZES = {**layer_norms("layer_norm_epsilon"), "block_count": "num_layers"}
_INTERNLM2 = ArchitectureNames(
    {name: module for name, module in LLAMA.items() if name not in ("attn_q", "attn_k", "attn_v")},
    permutes_qk=True,
    joined={"self_attn.wqkv": Joined(("attn_q", "attn_k", "attn_v"), "grouped")},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "bitnet": Architecture("bitnet", ArchitectureNames(_BITNET), _bitnet, has_head_dim=False),
    "chatglm": Architecture("chatglm", ArchitectureNames(_CHATGLM), _chatglm, _CHATGLM_SIZES, has_head_dim=False),
    "exaone": Architecture("exaone", ArchitectureNames(LLAMA), _exaone, _EXAONE_SIZES),
    "internlm2": Architecture("internlm2", _INTERNLM2, _internlm2),
    "jais2": Architecture("jais2", ArchitectureNames(LLAMA), _jais2, layer_norms("layer_norm_eps")),
    "command-r": Architecture("cohere", ArchitectureNames(LLAMA), _command_r, layer_norms("layer_norm_eps")),
    "cohere2": Architecture("cohere2", ArchitectureNames(LLAMA), _cohere2, layer_norms("layer_norm_eps")),
    "exaone4": Architecture("exaone4", SANDWICHED, _exaone4),
    "glm4": Architecture("glm4", ArchitectureNames({**LLAMA, **_GLM4}), _glm4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", ArchitectureNames(LLAMA), _hunyuan),
    "nemotron": Architecture("nemotron", ArchitectureNames(LLAMA, offset=1.0), _nemotron, layer_norms("norm_eps")),
    "olmo": Architecture("olmo", PERMUTED, _olmo, SIZES),
    "olmo2": Architecture(lambda model: "olmo3" if model.window else "olmo2", SANDWICHED, _olmo2),
    "phi3": Architecture("phi3", _PHI3, _phi3),
    "stablelm": Architecture("stablelm", ArchitectureNames(LLAMA), _stablelm, layer_norms("layer_norm_eps")),
    "starcoder2": Architecture(
        "starcoder2",
        ArchitectureNames({**LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        _starcoder2,
        layer_norms("norm_epsilon"),
    ),
}
