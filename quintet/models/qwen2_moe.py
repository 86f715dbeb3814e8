"""Qwen2-MoE and Qwen1.5-MoE (Yang et al. 2024): Qwen2 with experts, one of which serves every token."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window, refuse_long_chunks
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import SharedMoE, unstacked
from quintet.layers.rope import Rotary
from quintet.models.qwen3_moe import mixes, mixture


class Qwen2MoeForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, experts where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse_long_chunks(config, build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, window=layer_window(config, index), bias=config.qkv_bias)
            mlp: nn.Module
            if mixes(config, index):
                mlp = SharedMoE(build, mixture(config), config.shared_expert_intermediate_size)
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
