"""Solar Open 100B (Upstage 2025): Llama's attention, DeepSeek-V3's experts in every layer."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, unstacked
from quintet.models.deepseek_v3 import grouped
from quintet.models.llama import LlamaForCausalLM


class SolarOpenForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions."""

    unstacked = staticmethod(unstacked)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return MoE(build, grouped(config))
