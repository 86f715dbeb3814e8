"""Qwen2-MoE and Qwen1.5-MoE (Yang et al. 2024): Qwen2 with experts, one of which serves every token."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window
from quintet.layers.moe.moe import SharedMoE, unstacked
from quintet.models.qwen2 import Qwen2ForCausalLM
from quintet.models.qwen3_moe import mixes, mixture


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Pre-norm blocks, rotary positions, experts where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, window=layer_window(config, index), bias=config.qkv_bias)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if mixes(config, index):
            return SharedMoE(build, mixture(config), config.shared_expert_intermediate_size)
        return super()._mlp(config, build, index)
