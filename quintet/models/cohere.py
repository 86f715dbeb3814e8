"""Command R and Aya (Cohere 2024): Cohere 2 without windows; in Command R+, q and k are normalised."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.norm import HeadLayerNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.cohere2 import Cohere2ForCausalLM


class CohereForCausalLM(Cohere2ForCausalLM):
    """Full attention with rotary positions in all layers."""

    def _attention(self, config: Any, build: BuildContext, rotary: Rotary, index: int) -> SelfAttention:
        biased = config.attention_bias
        attention = SelfAttention(build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary)
        if config.use_qk_norm:
            queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
            attention.q_norm = HeadLayerNorm(build, queries, head_dim(config), config.layer_norm_eps)
            attention.k_norm = HeadLayerNorm(build, keys, head_dim(config), config.layer_norm_eps)
        return attention
