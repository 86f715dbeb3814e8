"""OLMo (Groeneveld et al. 2024): Llama with norms that learn nothing, and q, k and v clipped where trained so."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, ClippedAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary

EPS = 1e-5  # of every norm


class OlmoForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, biased = config.hidden_size, config.attention_bias
        norm = partial(LayerNorm, build, hidden, EPS, ())
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            attention = ClippedAttention(
                build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary
            )
            attention.clip_qkv = config.clip_qkv
            parts = {
                "input_layernorm": norm(),
                "self_attn": attention,
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, hidden, config.intermediate_size, config.hidden_act),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config)
