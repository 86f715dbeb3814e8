"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and another switch for the output's."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """The same blocks."""

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_out_bias)
