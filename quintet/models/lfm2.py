"""LFM2 (Liquid AI 2025): gated short convolutions, and attention in some layers."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import norm_eps
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.layers.ssm.short_conv import GatedConv
from quintet.models.llama import LlamaForCausalLM

RENAMED = {
    ".conv.": ".self_attn.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
    ".embedding_norm.": ".norm.",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
}


def mixer(config: Any, build: BuildContext, rotary: Rotary | None, index: int) -> GatedConv | SelfAttention:
    """A layer's convolution or attention, with norms on the heads of q and k."""
    kind = config.layer_types[index]
    if kind == "conv":
        return GatedConv(build, config)
    if kind != "full_attention":
        raise ValueError(f"layer_types[{index}] is {kind!r}; {config.model_type} here has conv and full_attention")
    attention = SelfAttention(build, AttentionSizes.from_config(config, output="out_proj"), rotary)
    attention.q_norm = RMSNorm(build, head_dim(config), norm_eps(config))
    attention.k_norm = RMSNorm(build, head_dim(config), norm_eps(config))
    return attention


def width(config: Any) -> int:
    """Width of the feed-forward layers: two thirds of the config's, scaled, and up to the next multiple."""
    written: int = config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return written
    inner = int(2 * written / 3)
    if config.block_ffn_dim_multiplier is None:
        return inner
    multiple: int = config.block_multiple_of
    return -(-int(config.block_ffn_dim_multiplier * inner) // multiple) * multiple


class Lfm2ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.recordable = build.causal  # CenteredConv

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        return mixer(config, build, rotary, index)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GatedMLP(build, config.hidden_size, width(config), "silu")
