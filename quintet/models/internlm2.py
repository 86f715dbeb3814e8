"""InternLM 2 and 2.5 (Shanghai AI Laboratory 2024): Llama with KV heads beside their queries in one tensor."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.linear import CheckpointLayout
from quintet.models.llama import LlamaForCausalLM

RENAMED = {
    "model.tok_embeddings.": "model.embed_tokens.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}


class InternLM2ForCausalLM(LlamaForCausalLM):
    """The same blocks by other names."""

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        # queries, key and value of each KV head, one after the other
        stored, biased = CheckpointLayout(fused="wqkv", num_strips=config.num_key_value_heads), config.attention_bias
        return AttentionSizes.from_config(config, bias=biased, output_bias=biased, stored=stored)

    @staticmethod
    def canonical(name: str) -> str:
        """Llama's names."""
        for there, here in RENAMED.items():
            name = name.replace(there, here, 1)
        return f"lm_head.{name.removeprefix('output.')}" if name.startswith("output.") else name
