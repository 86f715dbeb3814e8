"""Families in GPT-2's line: LayerNorm and biases, one tensor of queries, keys and values."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import LAYER_NORM_EPS, Architecture, Entries, layer_norms
from quintet.gguf.architectures.rope import rope
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Joined

_SIZES = {
    "context_length": "n_positions", "block_count": "n_layer", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner", "attention.head_count": "n_head", LAYER_NORM_EPS: "layer_norm_epsilon",
}  # fmt: skip
_BLOCKS = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_ENDS = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_WIDE = {  # of BLOOM, Falcon, GPT-NeoX
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
_WORDS = {
    "token_embd": "transformer.word_embeddings", "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip


def _gpt2(model: GGUFModel) -> Entries:
    return {"activation_function": "gelu_new"}


def _starcoder(model: GGUFModel) -> Entries:
    """The converter writes files of one KV head alone."""
    if model.kv_heads != 1:
        raise ValueError(f"{model.path} has {model.kv_heads} KV heads; starcoder here has 1")
    return {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def _bloom(model: GGUFModel) -> Entries:
    """The slopes are the heads' alone."""
    return {"seq_length": model.required_number("context_length")}


def _falcon(model: GGUFModel) -> Entries:
    """40B and 180B have a second norm; 7B has one KV head."""
    two = model.has("blk.0.attn_norm_2.weight")
    grouped = two or model.kv_heads not in (1, model.heads)
    return {
        "rope_parameters": rope(model),
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 2 if two else 1 if grouped else None,
        "num_kv_heads": model.kv_heads,
        "multi_query": model.kv_heads == 1,
        "parallel_attn": True,
        "bias": model.has("blk.0.ffn_up.bias"),
        "alibi": False,
    }


def _gpt_neox(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": rope(model, partial=True),
        "use_parallel_residual": bool(model.get("use_parallel_residual", True)),
        "attention_bias": model.has("blk.0.attn_qkv.bias"),
    }


def _mpt(model: GGUFModel) -> Entries:
    if model.number("attention.max_alibi_bias", 0.0) != 8:
        raise ValueError(f"{model.path}: attention.max_alibi_bias is not 8, which mpt here has")
    clip = model.get("attention.clamp_kqv")
    clip_qkv = None if clip is None else model.number("attention.clamp_kqv")
    return {"attn_config": {"clip_qkv": clip_qkv, "alibi": True}}


def _phi2(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model, partial=True), "hidden_act": "gelu_new"}


def _without(sizes: Mapping[str, str], *names: str) -> Mapping[str, str]:
    return {key: name for key, name in sizes.items() if key not in names}


def _falcon_names(model: GGUFModel) -> ArchitectureNames:
    """Names of a file; the first of two norms is the feed-forward's."""
    return _FALCON_TWO if model.has("blk.0.attn_norm_2.weight") else _FALCON_ONE


_FALCON = {**_WIDE, "attn_output": "self_attention.dense"}
_FALCON_ONE, _FALCON_TWO = (
    ArchitectureNames(
        {**_FALCON, **norms},
        _WORDS,
        "transformer.h",
        joined={"self_attention.query_key_value": Joined(("attn_qkv",), "grouped")},
    )
    for norms in ({}, {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
)
_NEOX = {**_WIDE, "attn_output": "attention.dense"}
_MPT_SIZES = {
    "context_length": "max_seq_len", "block_count": "n_layers", "embedding_length": "d_model",
    "attention.head_count": "n_heads", LAYER_NORM_EPS: "layer_norm_epsilon",
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "bloom": Architecture(
        "bloom",
        ArchitectureNames(
            {**_WIDE, "attn_output": "self_attention.dense"},
            _WORDS,
            "transformer.h",
            joined={"self_attention.query_key_value": Joined(("attn_qkv",), "grouped")},
        ),
        _bloom,
        {
            "block_count": "n_layer",
            "embedding_length": "hidden_size",
            "attention.head_count": "n_head",
            LAYER_NORM_EPS: "layer_norm_epsilon",
        },
        has_head_dim=False,
    ),
    "falcon": Architecture(
        "falcon",
        _falcon_names,
        _falcon,
        _without(layer_norms("layer_norm_epsilon"), "feed_forward_length", "attention.head_count_kv"),
        has_head_dim=False,
    ),
    "gpt2": Architecture(
        "gpt2",
        ArchitectureNames(_BLOCKS, _ENDS, "transformer.h", transposed=("c_attn", "c_proj", "c_fc")),
        _gpt2,
        _SIZES,
        has_head_dim=False,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        ArchitectureNames(
            _NEOX,
            {
                "token_embd": "gpt_neox.embed_in",
                "output_norm": "gpt_neox.final_layer_norm",
                "output": "lm_head",
            },  # fmt: skip
            "gpt_neox.layers",
            joined={"attention.query_key_value": Joined(("attn_qkv",), "grouped")},
        ),
        _gpt_neox,
        _without(layer_norms("layer_norm_eps"), "attention.head_count_kv"),
        has_head_dim=False,
    ),
    "mpt": Architecture(
        "mpt",
        ArchitectureNames(
            {
                "attn_norm": "norm_1",
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.out_proj",
                "ffn_norm": "norm_2",
                "ffn_up": "ffn.up_proj",
                "ffn_down": "ffn.down_proj",
            },  # fmt: skip
            {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
            "transformer.blocks",
        ),
        _mpt,
        _MPT_SIZES,
        has_head_dim=False,
    ),
    "phi2": Architecture(
        "phi",
        ArchitectureNames(
            {
                "attn_norm": "input_layernorm",
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },  # fmt: skip
            {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        ),
        _phi2,
        layer_norms("layer_norm_eps"),
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        ArchitectureNames(_BLOCKS, _ENDS, "transformer.h"),
        _starcoder,
        _SIZES,
        has_head_dim=False,
    ),
}
