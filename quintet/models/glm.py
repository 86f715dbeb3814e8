"""GLM-4 as of 2024 (Zeng et al. 2024): Llama with half of each head turned, neighbours paired, gate and up fused."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.linear import CheckpointLayout
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, biases on q, k and v where the checkpoint says so."""

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, partial=True, interleaved=True)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        fused = CheckpointLayout(fused="gate_up_proj")
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias)
