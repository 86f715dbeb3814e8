"""Encoders, whose hidden states become embeddings."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import LAYER_NORM_EPS, SIZES, Architecture, Entries, experts
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import LLAMA
from quintet.gguf.cursor import Array
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import FUSED, ArchitectureNames, Computed


def _encoder(model: GGUFModel, name: str, reads_head: bool = False) -> Entries:
    """The class of the trunk, and segments."""
    if not reads_head and (model.has("cls.weight") or model.has("cls.output.weight")):
        raise ValueError(f"{model.path} has a classifier behind the encoder, which quintet does not read from GGUF")
    segments = model.shape("token_types.weight")[0] if model.has("token_types.weight") else 0
    return {"architectures": [name], "type_vocab_size": segments}


def _bert(model: GGUFModel) -> Entries:
    """Also RoBERTa and XLM-RoBERTa: their files have the positions from the first token's on, and their classifiers
    are two matrices. BERT's is one behind the pooler, which files lack."""
    if not (model.has("cls.weight") and model.has("cls.output.weight")):
        return {**_encoder(model, "BertModel"), "hidden_act": "gelu"}
    labels = model.get("classifier.output_labels")
    count = model.shape("cls.output.weight")[0]
    named = list(labels) if isinstance(labels, Array) and labels.of_strings and len(labels) == count else None
    entries = {"id2label": dict(enumerate(named))} if named else {"num_labels": count}
    return {**_encoder(model, "BertForSequenceClassification", reads_head=True), "hidden_act": "gelu", **entries}


def _nomic_bert(model: GGUFModel) -> Entries:
    return {**_encoder(model, "NomicBertModel"), "hidden_act": "silu", "rope_parameters": rope(model, base=1000.0)}


def _nomic_moe(model: GGUFModel) -> Entries:
    """The converter leaves out the bias of what experts add up to."""
    return {
        **_nomic_bert(model),
        **experts(model, used="moe_top_k"),
        "hidden_act": "gelu",
        "rotary_emb_base": model.number("rope.freq_base", 10000.0),
        "moe_every_n_layers": model.required_number("moe_every_n_layers"),
        "has_experts_bias": False,
    }


def _jina_bert(model: GGUFModel) -> Entries:
    """The gate's activation, which the file does not have, is that of all that are published."""
    gated = _has_gate(model) or model.shape("blk.0.ffn_up.weight")[0] != model.required_number("feed_forward_length")
    return {
        **_encoder(model, "JinaBertModel"),
        "feed_forward_type": "geglu" if gated else "original",
        "qk_post_norm": model.has("blk.0.attn_q_norm.weight"),
        "hidden_act": "gelu",
    }


def _jina_v3(model: GGUFModel) -> Entries:
    """The model without the adapters of its tasks, which llama.cpp's converter writes to files of their own."""
    rotary = {"rope_parameters": rope(model, base=20000.0)}
    return {**_encoder(model, "JinaEmbeddingsV3Model"), "hidden_act": "gelu", **rotary}


def _has_gate(model: GGUFModel) -> bool:
    """True of the first files of Jina 2, in which both halves of the feed-forward's first matrix are apart."""
    return model.has("blk.0.ffn_gate.weight")


def _jina_names(model: GGUFModel) -> ArchitectureNames:
    """Names of a file. The gate is the first of the two halves, and the second where q and k are normed."""
    if _has_gate(model) or _jina_bert(model)["feed_forward_type"] == "original":
        return ArchitectureNames(_JINA, _ENDS, "layers")
    halves = ("up", "gate") if model.has("blk.0.attn_q_norm.weight") else ("gate", "up")
    return _halved(_JINA, _ENDS, halves)


def _halved(blocks: Mapping[str, str], ends: Mapping[str, str], halves: tuple[str, str]) -> ArchitectureNames:
    """Names where the first matrix of the feed-forward is two, over one another."""
    rest = {name: module for name, module in blocks.items() if name != "ffn_up"}
    parts = {name: f"mlp.{name}_proj" for name in halves}
    return ArchitectureNames({**rest, **parts}, ends, "layers", fused={**FUSED, "ffn_up": halves})


def _modern_bert(model: GGUFModel) -> Entries:
    """Windows in all layers but each third, from the first on."""
    every = model.required_number("attention.sliding_window_pattern", 3)
    base = model.number("rope.freq_base", 160000.0)
    bases = {"full_attention": base, "sliding_attention": model.number("rope.freq_base_swa", base)}
    kinds = ["sliding_attention" if model.window and i % every else "full_attention" for i in range(model.layers)]
    return {
        **_encoder(model, "ModernBertModel"),
        "local_attention": model.window or 128,
        "layer_types": kinds,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in bases.items()},
        "hidden_activation": model.get("hidden_act", "gelu"),
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _euro_bert(model: GGUFModel) -> Entries:
    return {"architectures": ["EuroBertModel"], "rope_parameters": rope(model), "pad_token_id": None}


_ENDS = {
    "token_embd": "words", "position_embd": "places", "token_types": "types", "token_embd_norm": "norm",
}  # fmt: skip
_BLOCKS = {
    "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
    "attn_output": "attention.o_proj", "attn_output_norm": "attention_norm", "ffn_up": "mlp.up_proj",
"ffn_down": "mlp.down_proj", "layer_output_norm": "norm",
}  # fmt: skip
_CLASSIFIER = {  # matrices of any type, in floats
    f"/classifier.{module}.{part}": Computed("same", (f"{name}.{part}",))
    for name, module in (("cls", "dense"), ("cls.output", "out_proj")) for part in ("weight", "bias")
}  # fmt: skip
_NAMES = ArchitectureNames(_BLOCKS, _ENDS, "layers", computed=_CLASSIFIER)
_NOMIC_MOE = ArchitectureNames(
    {
        **_BLOCKS, "ffn_gate_inp": "mlp.gate", "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    _ENDS,
    "layers",
)  # fmt: skip
_GATED = {**_BLOCKS, "ffn_gate": "mlp.gate_proj"}
_JINA = {
    **_GATED, "attn_q_norm": "attention.over_q", "attn_k_norm": "attention.over_k", "attn_norm_2": "between",
}  # fmt: skip
_MODERN = {
    **{name: _BLOCKS[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")},
    "attn_norm": "attention_norm", "ffn_norm": "mlp_norm",
}  # fmt: skip
_MODERN_ENDS = {"token_embd": "words", "token_embd_norm": "norm", "output_norm": "final_norm"}
_EURO_ENDS = {"token_embd": "embed_tokens", "output_norm": "norm"}
_COMMON = {key: name for key, name in SIZES.items() if key != "attention.head_count_kv"}
_MODERN_COMMON = {**_COMMON, LAYER_NORM_EPS: "norm_eps"}
_COMMON |= {LAYER_NORM_EPS: "layer_norm_eps"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture("bert", _NAMES, _bert, _COMMON, has_head_dim=False),
    "eurobert": Architecture("eurobert", ArchitectureNames(LLAMA, _EURO_ENDS, "layers"), _euro_bert),
    "jina-bert-v2": Architecture("jina_bert", _jina_names, _jina_bert, _COMMON, has_head_dim=False),
    "jina-bert-v3": Architecture(
        "jina_embeddings_v3", ArchitectureNames(_BLOCKS, _ENDS, "layers"), _jina_v3, _COMMON, has_head_dim=False
    ),
    "modern-bert": Architecture(
        "modernbert",
        _halved(_MODERN, _MODERN_ENDS, ("gate", "up")),
        _modern_bert,
        _MODERN_COMMON,
        has_head_dim=False,
    ),
    "nomic-bert-moe": Architecture("nomic_bert_moe", _NOMIC_MOE, _nomic_moe, _COMMON, has_head_dim=False),
    "nomic-bert": Architecture(
        "nomic_bert", ArchitectureNames(_GATED, _ENDS, "layers"), _nomic_bert, _COMMON, has_head_dim=False
    ),
}
