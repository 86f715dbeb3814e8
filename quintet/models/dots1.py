"""dots.llm1 (rednote 2025): Qwen3's attention, DeepSeek-V3's experts."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.glm4_moe import feed_forward


class Dots1ForCausalLM(CausalLM):
    """Pre-norm blocks, QK-norm before the rotation, windows where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            bias = config.attention_bias
            shape = AttentionSizes.from_config(config, window=layer_window(config, index), bias=bias, output_bias=bias)
            attention = SelfAttention(build, shape, rotary)
            attention.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            attention.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            return PreNormBlock(config, build, attention, feed_forward(config, build, index))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
