"""SmolLM3 (Bakouch et al. 2025): Llama without rotary positions in some layers."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, positions in the layers that no_rope_layers marks with 1, a gated feed-forward."""

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        window = layer_window(config, index) if config.use_sliding_window else None
        bias = config.attention_bias
        return AttentionSizes.from_config(config, window=window, bias=bias, output_bias=bias)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        return super()._attention(config, build, index, rotary if config.no_rope_layers[index] else None)
