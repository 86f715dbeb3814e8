"""Nemotron 4 and Minitron (Parmar et al. 2024): LayerNorm kept around 0, a plain feed-forward with squared relu."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


class NemotronForCausalLM(CausalLM):
    """Pre-norm blocks, part of each head turned."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, biased = config.hidden_size, config.attention_bias
        norm = partial(LayerNorm, build, hidden, config.norm_eps, offset=1.0)
        rotary = Rotary.from_config(build, config, partial=True)
        names = "up_proj", "down_proj"

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(
                    build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary
                ),
                "post_attention_layernorm": norm(),
                "mlp": MLP(build, (hidden, config.intermediate_size), config.hidden_act, names, config.mlp_bias),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config)
