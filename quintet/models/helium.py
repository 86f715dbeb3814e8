"""Helium 1 (Kyutai 2025): Llama with neighbours turned."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class HeliumForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, a gated feed-forward; biases on q, k and v where the checkpoint says so."""

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        return Rotary.from_config(build, config, interleaved=True)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, bias=config.attention_bias)
