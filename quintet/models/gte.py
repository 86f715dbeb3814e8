"""GTE's own encoder (Zhang et al. 2024), the trunk: BERT with rotary positions and a gated feed-forward."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes, eps, gated_mlp
from quintet.layers.rope import Rotary


class GteModel(Encoder):
    """Positions turn."""

    prefixes = ("gte.", "new.")
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        ("encoder.layer.", "layers."),
        ("self_attn.", "attention."),
        ("attn_ln.", "attention_norm."),
        ("mlp_ln.", "norm."),
        ("post_attention_layernorm.", "attention_norm."),
        ("post_mlp_layernorm.", "norm."),
    )

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary.from_config(build, config)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = SelfAttention(build, encoder_attention_sizes(config), rotary)
        mlp = gated_mlp(config, build, config.hidden_act, (False, True))
        return PostNormEncoderBlock(build, attention, mlp, config.hidden_size, eps(config))
