"""GLM-4 as of 2024 (Zeng et al. 2024): Llama with half of each head turned, neighbours paired, gate and up fused."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class GlmForCausalLM(CausalLM):
    """Pre-norm blocks, biases on q, k and v where the checkpoint says so."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, shape = Rotary.from_config(build, config, partial=True, interleaved=True), self._heads(config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            fused = CheckpointLayout(fused="gate_up_proj")
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    def _heads(self, config: Any) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias)
