"""ChatGLM 2 and 3, GLM-4-9B as first published (Zeng et al. 2024): GLM by other names, q, k and v in one."""

from typing import Any

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse, require
from quintet.layers.linear import CheckpointLayout
from quintet.models.glm import GlmForCausalLM

RENAMED = {
    "transformer.embedding.word_embeddings.": "model.embed_tokens.",
    "transformer.encoder.final_layernorm.": "model.norm.",
    "transformer.encoder.layers.": "model.layers.",
    "transformer.output_layer.": "lm_head.",
    ".self_attention.dense.": ".self_attn.o_proj.",
    ".self_attention.": ".self_attn.",
    ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
    ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
}
# entries of the published code -> what alone is computed here
COMPUTED = {"rmsnorm": True, "original_rope": True, "post_layer_norm": True, "multi_query_attention": True}


class ChatGLMForCausalLM(GlmForCausalLM):
    """The same blocks."""

    renamed_tensors = RENAMED
    ignored_tensors = (*GlmForCausalLM.ignored_tensors, r"transformer\.rotary_pos_emb\.inv_freq")

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "position_encoding_2d", "add_bias_linear", "apply_residual_connection_post_layernorm")
        refuse(config, "vision_config", "pre_seq_len", "quantization_bit")
        require(config, COMPUTED)
        super().__init__(config, build)

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        return AttentionSizes.from_config(
            config, bias=config.attention_bias, stored=CheckpointLayout(fused="query_key_value")
        )
