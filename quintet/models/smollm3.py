"""SmolLM3 (Bakouch et al. 2025): Llama without rotary positions in some layers."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock, layer_window
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class SmolLM3ForCausalLM(CausalLM):
    """Pre-norm blocks, positions in the layers that no_rope_layers marks with 1, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(
                config,
                window=layer_window(config, index) if config.use_sliding_window else None,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            attention = SelfAttention(build, shape, rotary if config.no_rope_layers[index] else None)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
            return PreNormBlock(config, build, attention, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
