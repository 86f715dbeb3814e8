"""Llama 2, 3 and 3.x (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary


class LlamaForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions or ALiBi, a gated feed-forward; the head may be tied to the embedding.

    `shape` and `trunk` are of families that differ from Llama in these.
    """

    def __init__(
        self,
        config: Any,
        build: BuildContext,
        shape: AttentionSizes | None = None,
        trunk: type[DecoderTrunk] = DecoderTrunk,
    ) -> None:
        super().__init__(build)
        shape = shape or AttentionSizes.from_config(
            config, bias=config.attention_bias, output_bias=config.attention_bias
        )
        rotary = None if shape.alibi else Rotary.from_config(build, config)
        mlp_bias = getattr(config, "mlp_bias", False)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, mlp_bias)
            return PreNormBlock(config, build, SelfAttention(build, shape, rotary), mlp)

        self.model = trunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
