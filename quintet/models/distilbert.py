"""DistilBERT (Sanh et al. 2019), the trunk: BERT without segments, in half of the layers."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.encoder import Encoder, PostNormEncoderBlock, encoder_attention_sizes
from quintet.layers.mlp import MLP
from quintet.layers.rope import Rotary

EPS = 1e-12


class DistilBertModel(Encoder):
    """Learned positions."""

    prefixes = ("distilbert.",)
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.position_embeddings.", "places."),
        ("embeddings.LayerNorm.", "norm."),
        ("transformer.layer.", "layers."),
        ("attention.q_lin.", "attention.q_proj."),
        ("attention.k_lin.", "attention.k_proj."),
        ("attention.v_lin.", "attention.v_proj."),
        ("attention.out_lin.", "attention.o_proj."),
        ("sa_layer_norm.", "attention_norm."),
        ("ffn.lin1.", "mlp.up_proj."),
        ("ffn.lin2.", "mlp.down_proj."),
        ("output_layer_norm.", "norm."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        config.layer_norm_eps, config.type_vocab_size = EPS, 0
        super().__init__(config, build)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        mlp = MLP(build, (config.dim, config.hidden_dim), config.activation, ("up_proj", "down_proj"))
        return PostNormEncoderBlock(
            build, SelfAttention(build, encoder_attention_sizes(config), None), mlp, config.dim, EPS
        )
