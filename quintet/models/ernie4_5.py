"""Ernie 4.5, dense (Baidu 2025): Llama with neighbours turned, and one switch for all biases; text of PaddleOCR-VL."""

from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, a gated feed-forward."""

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, interleaved=config.model_type != "paddleocr_vl_text")

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.use_bias, output_bias=config.use_bias)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.use_bias)
