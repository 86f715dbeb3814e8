"""Solar Open 100B (Upstage 2025): Llama's attention, DeepSeek-V3's experts in every layer."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import MoE, unstacked
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import grouped


class SolarOpenForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, mixture = Rotary.from_config(build, config), grouped(config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            attention = SelfAttention(build, AttentionSizes.from_config(config, bias=config.attention_bias), rotary)
            return PreNormBlock(config, build, attention, MoE(build, mixture))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
