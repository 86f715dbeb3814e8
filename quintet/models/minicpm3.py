"""MiniCPM3 (Hu et al. 2024): latent attention, a multiplier on the embedding, each branch and the logits."""

import math
from typing import Any

from torch import Tensor

from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, rounded
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.models.granite import GraniteDecoderLayer


class MiniCPM3DecoderLayer(GraniteDecoderLayer):
    """Deeper models add less in each branch."""

    @staticmethod
    def multiplier(config: Any) -> float:
        return float(config.scale_depth / math.sqrt(config.num_hidden_layers))


class MiniCPM3ForCausalLM(CausalLM):
    """Pre-norm blocks with scaled branches, halves turned, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        shape = MLASizes.from_config(config)
        rotary = Rotary(build, config.qk_rope_head_dim, config.rope_parameters, config.max_position_embeddings)

        def block(config: Any, build: BuildContext, index: int) -> MiniCPM3DecoderLayer:
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return MiniCPM3DecoderLayer(config, build, LatentAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block, rounded(config.scale_emb, build.dtype))
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._factor = build.ops.take("scale"), config.dim_model_base / config.hidden_size

    def head(self, x: Tensor) -> Tensor:
        return super().head(self._ops.scale(x, self._factor))
