"""Megatron-BERT (Shoeybi et al. 2019), the trunk: BERT with norms before the branches, and a last one."""

from typing import Any

from torch import Tensor, nn

from quintet.interface.types import Batch
from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse
from quintet.layers.encoder import Encoder, PreNormEncoderBlock, encoder_attention_sizes, eps, plain_mlp
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.models.bert import NAMES


class MegatronBertModel(Encoder):
    """Learned positions, and segments; their sum has no norm."""

    prefixes = ("bert.",)
    names = (
        ("encoder.ln.", "final_norm."),
        (".attention.ln.", ".attention_norm."),
        (".ln.", ".mlp_norm."),
        *NAMES,
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "is_decoder")
        super().__init__(config, build)
        self.norm = nn.Identity()
        self.final_norm = LayerNorm(build, config.hidden_size, eps(config))

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = SelfAttention(build, encoder_attention_sizes(config), None)
        norms = [LayerNorm(build, config.hidden_size, eps(config)) for _ in range(2)]
        return PreNormEncoderBlock(build, attention, plain_mlp(config, build), (norms[0], norms[1]))

    def finished(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.final_norm(x)
        return out
