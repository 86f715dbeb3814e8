"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on q, k and v, and a window in some layers."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import layer_window, refuse_long_chunks
from quintet.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward; which layers have a window is the checkpoint's."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse_long_chunks(config, build)
        super().__init__(config, build)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(config, window=layer_window(config, index), bias=True)
