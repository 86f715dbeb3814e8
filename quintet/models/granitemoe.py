"""Granite 3 MoE and PowerMoE (IBM 2024): Granite with a mixture of experts in every layer."""

from typing import Any

from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import DOWN, GATE, UP, MoE, unstacked
from quintet.layers.rope import Rotary
from quintet.models.granite import GraniteDecoderLayer
from quintet.models.mixtral import mixture_of

RENAMED = {
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": f".mlp.experts.{GATE[:4]}_{UP}",
    ".block_sparse_moe.output_linear.weight": f".mlp.experts.{DOWN}",
}  # a checkpoint's names -> those of transformers' other mixtures


class GraniteMoeForCausalLM(CausalLM):
    """Granite's multipliers; a softmax over the experts that a token has."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)
        mixture = mixture_of(config)

        def block(config: Any, build: BuildContext, index: int) -> GraniteDecoderLayer:
            bias = config.attention_bias
            shape = AttentionSizes.from_config(config, scale=config.attention_multiplier, bias=bias, output_bias=bias)
            return GraniteDecoderLayer(config, build, SelfAttention(build, shape, rotary), MoE(build, mixture))

        self.model = DecoderTrunk(config, build, block, scale=config.embedding_multiplier, scales_input_embeds=True)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._factor)
        return out
