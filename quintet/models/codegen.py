"""CodeGen (Nijkamp et al. 2022): GPT-J with q, v and k of a quarter of the heads side by side."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.linear import CheckpointLayout
from quintet.models.gptj import GPTJForCausalLM

QUARTERS = CheckpointLayout(fused="qkv_proj", num_strips=4, order=(0, 2, 1))  # as it was trained on TPUs


class CodeGenForCausalLM(GPTJForCausalLM):
    """The same blocks."""

    def _heads(self, config: Any) -> AttentionSizes:
        return AttentionSizes.from_config(
            config, kv_heads=config.num_attention_heads, output="out_proj", stored=QUARTERS
        )
