"""Nomic's BERT (Nussbaum et al. 2024), the trunk: rotary positions, gated feed-forward, no biases."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNorm, eps, gated_mlp, heads
from quintet.layers.rope import Rotary


class NomicBertModel(Encoder):
    """Segments; positions turn."""

    prefixes = ("nomic_bert.", "bert.")
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        ("emb_ln.", "norm."),
        ("encoder.layers.", "layers."),
        ("self_attn.", "attention."),
        (".attn.out_proj.", ".attention.o_proj."),
        (".attn.Wqkv.", ".attention.qkv_proj."),
        ("mlp.fc11.", "mlp.up_proj."),
        ("mlp.fc12.", "mlp.gate_proj."),
        ("mlp.fc2.", "mlp.down_proj."),
        ("post_attention_layernorm.", "attention_norm."),
        ("post_mlp_layernorm.", "norm."),
        (".norm1.", ".attention_norm."),
        (".norm2.", ".norm."),
    )

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary.of(build, config)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = SelfAttention(build, heads(config, bias=False), rotary)
        mlp = gated_mlp(config, build, config.hidden_act)
        return PostNorm(build, attention, mlp, config.hidden_size, eps(config))
