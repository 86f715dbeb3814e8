"""Apertus (Swiss AI Initiative 2025): Llama with QK-norm, and a plain feed-forward with a learned activation."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP, XieluMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim


class ApertusForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions."""

    ignored_tensors = (*CausalLM.ignored_tensors, r".*\.act_fn\.(beta|eps)")  # 0.5 and -1e-6, which the op has as well

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, eps = Rotary.from_config(build, config), config.rms_norm_eps
        norm = partial(RMSNorm, build, config.hidden_size, eps)
        biased, names = config.attention_bias, ("up_proj", "down_proj")
        sizes = config.hidden_size, config.intermediate_size

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            attention = SelfAttention(
                build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary
            )
            attention.q_norm = RMSNorm(build, head_dim(config), eps)
            attention.k_norm = RMSNorm(build, head_dim(config), eps)
            plain = config.hidden_act != "xielu"
            parts = {
                "attention_layernorm": norm(),
                "self_attn": attention,
                "feedforward_layernorm": norm(),
                "mlp": MLP(build, sizes, config.hidden_act, names, bias=False)
                if plain
                else XieluMLP(build, sizes, names),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
