"""Sizes of the small models that checks use."""

from quintet.conformance.harness.reference_model import LENGTH, VOCAB

WINDOW = 17  # tokens; longer than a page of 16, shorter than the prompts of the tests

PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 77,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
SPACES = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
DELTA = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
INKLING = {  # each kind of layer with both feed-forwards, windows of as many tokens as have numbers
    **PLAIN, "head_dim": 16, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 12,
    "sliding_window_size": WINDOW, "d_rel": 5, "rel_extent": 21, "unpadded_vocab_size": VOCAB - 3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 61,
    "route_scale": 1.5, "logits_mup_width_multiplier": 2.0,
}  # fmt: skip
INKLING_SCALED = {
    "log_scaling_n_floor": 8, "log_scaling_alpha": 0.5, "conv_kernel_size": 3, "n_shared_experts": 1,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"], "mlp_layer_types": ["sparse", "dense", "sparse"],
}  # fmt: skip
INKLING_VARIANTS = {"plain": INKLING, "scaled by position": {**INKLING, **INKLING_SCALED}}
GEMMA = {**PLAIN, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
SHORT_AND_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 5.0, 9.0, 11.0],
    "rope_theta": 10000.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
CHUNKS = {
    "head_dim": 16,
    "intermediate_size_mlp": 61,
    "num_local_experts": 5,
    "attention_chunk_size": 19,
    "floor_scale": 16,
    "attn_scale": 0.5,
}
STREAMS = {
    **GEMMA,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"
    ],
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.6, 0.0, 0.9, 0.0, 0.3],
    "vocab_size_per_layer_input": VOCAB - 4,
    "hidden_size_per_layer_input": 10,
    "laurel_rank": 8,
}  # fmt: skip
GRANITE_4 = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 61,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 61,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
GEMMA_4 = {
    **PLAIN, "head_dim": 16, "sliding_window": WINDOW, "tie_word_embeddings": True, "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"
    ],
    "global_head_dim": 24, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
}  # fmt: skip
GEMMA_4_LARGE = {
    **GEMMA_4, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA_4_VARIANTS = {
    "gemma4_text": {
        "plain": {
            **GEMMA_4,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB,
        },
        "experts, keys as values": {
            **GEMMA_4_LARGE,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 61,
        },
    },  # fmt: skip
    "gemma4_unified_text": {"plain": {**GEMMA_4_LARGE, "final_logit_softcapping": None}, "shared": GEMMA_4},
}
LFM3 = {
    "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 16,
    "conv_L_cache": 7,
}  # fmt: skip
