"""Seed-OSS (ByteDance 2025): Llama with biases on q, k and v, and another switch for the output's."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """The same blocks."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        shape = AttentionSizes.from_config(config, bias=config.attention_bias, output_bias=config.attention_out_bias)
        super().__init__(config, build, shape)
