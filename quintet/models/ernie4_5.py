"""Ernie 4.5, dense (Baidu 2025): Llama with neighbours turned, and one switch for all biases."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class Ernie4_5ForCausalLM(CausalLM):
    """Pre-norm blocks, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, interleaved=True)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, bias=config.use_bias, output_bias=config.use_bias)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.use_bias)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
