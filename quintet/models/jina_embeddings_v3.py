"""Jina Embeddings v3 (Sturua et al. 2024), the trunk: XLM-RoBERTa with rotary positions."""

from typing import Any

from quintet.layers.build import Build
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder
from quintet.layers.rope import Rotary


class Model(Encoder):
    """Positions turn."""

    prefixes = ("roberta.", "jina_embeddings_v3.", "model.")
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        ("emb_ln.", "norm."),
        ("encoder.layers.", "layers."),
        ("self_attn.", "attention."),
        (".mixer.out_proj.", ".attention.o_proj."),
        (".mixer.Wqkv.", ".attention.qkv_proj."),
        ("mlp.fc1.", "mlp.up_proj."),
        ("mlp.fc2.", "mlp.down_proj."),
        ("post_attention_layernorm.", "attention_norm."),
        ("post_mlp_layernorm.", "norm."),
        (".norm1.", ".attention_norm."),
        (".norm2.", ".norm."),
    )

    def positions(self, config: Any, build: Build, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: Build) -> Rotary | None:
        return Rotary.of(build, config)
