"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with fused projections, and part of each head turned."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class Phi3ForCausalLM(CausalLM):
    """Pre-norm blocks; q, k and v are one tensor in the checkpoint, and so are the feed-forward's gate and up."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config, partial=True)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(
                config, window=config.sliding_window, stored=CheckpointLayout(fused="qkv_proj")
            )
            fused = CheckpointLayout(fused="gate_up_proj")
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, stored=fused)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
