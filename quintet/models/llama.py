"""Llama 2, 3 and 3.x (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import BlockFactory, CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class LlamaForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward; the head may be tied to the embedding.

    A family that differs in one part overrides the hook that builds it.
    """

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = self._rotary(config, build)

        def block(config: Any, build: BuildContext, index: int) -> nn.Module:
            attention = self._attention(config, build, index, rotary)
            return self._block(config, build, attention, self._mlp(config, build, index))

        self.model = self._trunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        """Builds the embedding, the blocks and the last norm."""
        return DecoderTrunk(config, build, block)

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        """Builds a layer of its two branches."""
        return PreNormBlock(config, build, attention, mlp)

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        """Builds the rotary table that the layers share; None: positions are not rotary."""
        return Rotary.from_config(build, config)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        """Returns heads, biases, window and checkpoint layout of a layer's attention."""
        return AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_bias)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        """Builds a layer's attention, or what mixes positions in its place."""
        return SelfAttention(build, self._attention_sizes(config, index), rotary)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        """Builds a layer's feed-forward."""
        bias = getattr(config, "mlp_bias", False)
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, bias)
