"""Qwen3, dense (Yang et al. 2025): Qwen2 without biases, and with each head's q and k normalised."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window, refuse_long_chunks
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim


class Qwen3ForCausalLM(CausalLM):
    """Pre-norm blocks, QK-norm before the rotation, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse_long_chunks(config, build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(
                config,
                window=layer_window(config, index),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            attention = SelfAttention(build, shape, rotary)
            attention.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            attention.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, attention, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
