"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and a window in some layers."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window, refuse_long_chunks
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class Qwen2ForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward; which layers have a window is the checkpoint's."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse_long_chunks(config, build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, window=layer_window(config, index), bias=True)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
