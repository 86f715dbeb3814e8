"""GLM-4.5, 4.6 and 4.7 (Zeng et al. 2025): partly transposed heads, DeepSeek-V3's experts."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import beyond, dense, grouped


class Glm4MoeForCausalLM(CausalLM):
    """Pre-norm blocks, QK-norm where the checkpoint has it; the first layers have one feed-forward."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        self.ignored_tensors = (*CausalLM.ignored_tensors, beyond(config))
        rotary = Rotary.from_config(build, config, partial=True)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            attention = SelfAttention(build, AttentionSizes.from_config(config, bias=config.attention_bias), rotary)
            if config.use_qk_norm:
                attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps)
                attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps)
            return PreNormBlock(config, build, attention, feed_forward(config, build, index))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def feed_forward(config: Any, build: BuildContext, index: int) -> nn.Module:
    """Builds a layer's feed-forward, for configs that name their entries as DeepSeek's do."""
    if dense(config, index):
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
    return MoE(build, grouped(config))
