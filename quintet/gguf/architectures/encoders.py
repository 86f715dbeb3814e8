"""Encoders, whose hidden states become embeddings."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import LAYER_NORM_EPS, SIZES, Architecture, Entries
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames

POOLING = {1: "MEAN", 2: "CLS", 3: "LAST"}  # pooling_type, as llama.cpp counts them; 0 and none: of tokens


def _encoder(model: GGUFModel, name: str) -> Entries:
    """The class of the trunk, segments, and how a text's states become one embedding."""
    if model.has("cls.weight") or model.has("cls.output.weight"):
        raise ValueError(f"{model.path} has a classifier behind the encoder, which quintet does not read from GGUF")
    segments = model.shape("token_types.weight")[0] if model.has("token_types.weight") else 0
    pooling = POOLING.get(model.get("pooling_type", 0))
    entries = {"architectures": [name], "type_vocab_size": segments, "pooling_type": pooling}
    return {key: value for key, value in entries.items() if value is not None}


def _bert(model: GGUFModel) -> Entries:
    """Positions are counted from 0; RoBERTa's files are of the same architecture, with another vocabulary."""
    if model.metadata.get("tokenizer.ggml.model") not in ("bert", "none"):
        raise ValueError(f"{model.path} is a RoBERTa, which quintet does not read from GGUF; use its original files")
    return {**_encoder(model, "BertModel"), "hidden_act": "gelu"}


_ENDS = {
    "token_embd": "words", "position_embd": "places", "token_types": "types", "token_embd_norm": "norm",
}  # fmt: skip
_BLOCKS = {
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj", "attn_output_norm": "attention_norm", "ffn_up": "mlp.up_proj",
"ffn_down": "mlp.down_proj", "layer_output_norm": "norm",
}  # fmt: skip
_NAMES = ArchitectureNames(_BLOCKS, _ENDS, "layers")
_COMMON = {key: name for key, name in SIZES.items() if key != "attention.head_count_kv"}
_COMMON |= {LAYER_NORM_EPS: "layer_norm_eps"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture("bert", _NAMES, _bert, _COMMON, has_head_dim=False),
}
