"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer, where the checkpoint has one."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The same blocks."""

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, window=config.sliding_window)
