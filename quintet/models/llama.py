"""Llama 2, 3 and 3.x (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import BlockFactory, CausalLM, DecoderTrunk, PreNormBlock, head_source
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class LlamaForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward; the head may be tied to the embedding."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, shape = self._rotary(config, build), self._heads(config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = self._trunk(config, build, block)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary.of(build, config)

    def _heads(self, config: Any) -> AttentionSizes:
        return AttentionSizes.of(config, bias=config.attention_bias, output_bias=config.attention_bias)

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        return DecoderTrunk(config, build, block)
