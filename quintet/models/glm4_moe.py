"""GLM-4.5, 4.6 and 4.7 (Zeng et al. 2025): partly transposed heads, DeepSeek-V3's experts."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import beyond, dense, grouped
from quintet.models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, QK-norm where the checkpoint has it; the first layers have one feed-forward."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.ignored_tensors = (*LlamaForCausalLM.ignored_tensors, beyond(config))

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, partial=True)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = super()._attention(config, build, index, rotary)
        if getattr(config, "use_qk_norm", False):
            attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps)
            attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps)
        return attention

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if dense(config, index):
            return super()._mlp(config, build, index)
        return MoE(build, grouped(config))
