"""EXAONE 4 (LG AI Research 2025): OLMo 2's blocks, each head's q and k normalised, positions in windows alone."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import PostNormBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, layer_window
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim


class Exaone4ForCausalLM(CausalLM):
    """Post-norm blocks; every layer has positions in a checkpoint without windows (1.2B), else only windowed ones."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)
        norm = partial(RMSNorm, build, config.hidden_size, config.rms_norm_eps)

        def block(config: Any, build: BuildContext, index: int) -> PostNormBlock:
            parts = {
                "self_attn": attention(config, build, rotary, index),
                "post_attention_layernorm": norm(),
                "mlp": GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act),
                "post_feedforward_layernorm": norm(),
            }
            return PostNormBlock(build, parts)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def attention(config: Any, build: BuildContext, rotary: Rotary, index: int) -> SelfAttention:
    """A layer's, with norms on the heads of q and k; in a checkpoint with windows, positions are theirs alone."""
    window = layer_window(config, index)
    turned = config.sliding_window is None or window is not None
    made = SelfAttention(build, AttentionSizes.from_config(config, window=window), rotary if turned else None)
    made.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
    made.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
    return made
