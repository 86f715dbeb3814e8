"""Nomic's BERT (Nussbaum et al. 2024), the trunk: rotary positions, gated feed-forward, no biases."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes, eps, gated_mlp
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
        return Rotary.from_config(build, config)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = SelfAttention(build, encoder_attention_sizes(config, bias=False), rotary)
        mlp = gated_mlp(config, build, config.hidden_act)
        return PostNormEncoderBlock(build, attention, mlp, config.hidden_size, eps(config))
