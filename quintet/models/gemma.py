"""Gemma (Mesnard et al. 2024): Llama with norms that are kept around 0 and an embedding scaled by sqrt(hidden)."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, refuse, rounded
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


class GemmaForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a feed-forward gated by gelu."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if build.causal and not build.whole_prompts:
            refuse(config, "use_bidirectional_attention")
        hidden, biased = config.hidden_size, config.attention_bias
        rotary = Rotary.from_config(build, config)
        norm = partial(RMSNorm, build, hidden, config.rms_norm_eps, offset=1.0)

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            shape = AttentionSizes.from_config(config, bias=biased, output_bias=biased)
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(build, shape, rotary),
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, hidden, config.intermediate_size, config.hidden_act),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block, rounded(hidden**0.5, build.dtype), norm=norm())
        self.lm_head = LMHead.from_config(build, config)
