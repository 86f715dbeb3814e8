"""Families with sparse latent attention or hyper-connections, and text models that transformers has in wrappers alone.

A wrapper's text model has no class with a head there: its reference is the text model with a head of its own.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from quintet.conformance.harness.reference_model import LENGTH
from quintet_tools.checkpoints.sizes import PLAIN, WINDOW

GROUPED = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 61,
    "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
SPARSE = {
    "num_key_value_heads": 6, "q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip
HY_V4 = {
    **PLAIN, **GROUPED, **SPARSE, "n_group": 1, "topk_group": 1, "index_topk": LENGTH, "hc_mult": 3,
    "swiglu_limit": 1.5,
}  # fmt: skip
GLM_5_NEXT = {
    **{name: value for name, value in {**PLAIN, **GROUPED, **SPARSE}.items() if name != "first_k_dense_replace"},
    "qk_rope_head_dim": 0, "index_topk": LENGTH, "hc_mult": 3, "swiglu_limit": 1.5, "linear_head_dim": 12,
    "linear_num_heads": 4, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
MISTRAL_LARGE_4 = {
    **PLAIN, **GROUPED, **SPARSE, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "index_topk": LENGTH,
    "final_logit_softcapping": 20.0, "no_rope_layers": [1, 0, 1],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "attention_factor": 1.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
DEEPSEEK_V4 = {
    **PLAIN, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 28, "o_groups": 2, "o_lora_rank": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "sliding_window": WINDOW, "index_head_dim": 16, "index_n_heads": 32, "index_topk": 6, "hc_mult": 3,
    "hc_sinkhorn_iters": 4, "swiglu_limit": 1.5, "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 24},
    "layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
}  # fmt: skip
HYPER_CONNECTED: dict[str, dict[str, dict[str, Any]]] = {  # by model_type, and those with the same attention
    "deepseek_v4": {
        "plain": DEEPSEEK_V4,
        "one stream": {**DEEPSEEK_V4, "hc_mult": 1, "hc_sinkhorn_iters": 1, "swiglu_limit": 0.5},
    },
    "glm5_next_text": {
        "plain": GLM_5_NEXT,
        "unbounded decays, groups of experts": {
            **GLM_5_NEXT, "linear_lower_bound": None, "n_group": 4, "topk_group": 2, "hc_sinkhorn_iters": 3,
        },
    },
    "hy_v4": {"plain": HY_V4},
    "mistral_large4_text": {"plain": MISTRAL_LARGE_4},
}  # fmt: skip
TEXTS = {  # text models without a class of their own that has a head -> the class of the wrapper
    "glm5_next_text": "Glm5NextForConditionalGeneration",
    "mistral_large4_text": "MistralLarge4ForConditionalGeneration",
}


class TextModel(nn.Module):
    """A wrapper's text model, and a head."""

    def __init__(self, family: str, settings: Mapping[str, Any]) -> None:
        super().__init__()
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.config = AutoConfig.for_model(family, **settings)
        self.model = AutoModel.from_config(self.config, **plain)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def forward(self, ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        logits = self.lm_head(self.model(ids, use_cache=use_cache).last_hidden_state)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return SimpleNamespace(logits=logits if cap is None else torch.tanh(logits / cap) * cap)

    def get_decoder(self) -> Any:
        """Returns the model without the head."""
        return self.model
