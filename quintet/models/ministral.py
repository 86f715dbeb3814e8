"""Ministral 8B (Mistral 2024): Mistral with a window chosen per layer. CWM (Meta 2025) is built alike."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class MinistralForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, window=layer_window(config, index))
            mlp = GatedMLP(
                build,
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                getattr(config, "mlp_bias", False),
            )
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
