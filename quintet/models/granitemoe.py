"""Granite 3 MoE and PowerMoE (IBM 2024): Granite with a mixture of experts in every layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, head_source
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import DOWN, GATE, UP, MoE, unstacked
from quintet.layers.rope import Rotary
from quintet.models.granite import GraniteDecoderLayer
from quintet.models.mixtral import mixture_of

NAMES = {
    ".block_sparse_moe.router.layer.": ".mlp.gate.",
    ".block_sparse_moe.input_linear.weight": f".mlp.experts.{GATE[:4]}_{UP}",
    ".block_sparse_moe.output_linear.weight": f".mlp.experts.{DOWN}",
}  # what a checkpoint calls them -> as transformers' other mixtures do


class GraniteMoeForCausalLM(CausalLM):
    """Granite's multipliers; a softmax over the experts that a token has."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.of(build, config)
        mixture = mixture_of(config)

        def block(config: Any, build: BuildContext, index: int) -> GraniteDecoderLayer:
            bias = config.attention_bias
            shape = AttentionSizes.of(config, scale=config.attention_multiplier, bias=bias, output_bias=bias)
            return GraniteDecoderLayer(config, build, SelfAttention(build, shape, rotary), MoE(build, mixture))

        self.model = DecoderTrunk(config, build, block, scale=config.embedding_multiplier, scales_given=True)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling

    @staticmethod
    def canonical(name: str) -> str:
        for own, ours in NAMES.items():
            name = name.replace(own, ours)
        return name

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        return unstacked(name, shape)

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._factor)
        return out
