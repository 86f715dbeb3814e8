"""Ministral 8B (Mistral 2024): Mistral with a window chosen per layer. CWM (Meta 2025) is built alike."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.decoder import layer_window
from quintet.models.llama import LlamaForCausalLM


class MinistralForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward."""

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, window=layer_window(config, index))
