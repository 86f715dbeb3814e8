"""AFM (Arcee 2025): Llama with a plain feed-forward and squared relu as its activation."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.rope import Rotary


class ArceeForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            shape = AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_bias)
            mlp = MLP(
                build,
                (config.hidden_size, config.intermediate_size),
                config.hidden_act,
                ("up_proj", "down_proj"),
                config.mlp_bias,
            )
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
