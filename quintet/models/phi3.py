"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with fused projections, and part of each head turned."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.linear import CheckpointLayout
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks; q, k and v are one tensor in the checkpoint, and so are the feed-forward's gate and up."""

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, partial=True)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        stored = CheckpointLayout(fused="qkv_proj")
        return AttentionSizes.from_config(config, window=config.sliding_window, stored=stored)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        fused = CheckpointLayout(fused="gate_up_proj")
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused)
