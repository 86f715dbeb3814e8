"""Qwen3, dense (Yang et al. 2025): Qwen2 without biases, and with each head's q and k normalised."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window, refuse_long_chunks
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, QK-norm before the rotation, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse_long_chunks(config, build)
        super().__init__(config, build)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        window, bias = layer_window(config, index), config.attention_bias
        return AttentionSizes.from_config(config, window=window, bias=bias, output_bias=bias)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = super()._attention(config, build, index, rotary)
        attention.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
        attention.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
        return attention
