"""Small models of families whose attention is to blocks that an indexer chooses."""

from typing import Any

from quintet_tools.checkpoints.sizes import DELTA, PLAIN

HEAD = {**PLAIN, "head_dim": 16}
HALF = {**HEAD, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
MINIMAX_M3 = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 61, "dense_intermediate_size": 77,
    "shared_intermediate_size": 50, "index_n_heads": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2],
    "index_head_dim": 12, "index_block_size": 8, "index_topk_blocks": 4,
}  # fmt: skip
QWEN4 = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 61, "shared_expert_intermediate_size": 71,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "hc_count": 3, "hc_lowrank": 10, "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4,
    "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 24,
    "indexer_compress_ratio": 4,
}  # fmt: skip

# family -> variant -> what its config is made of
BLOCK_SPARSE: dict[str, dict[str, dict[str, Any]]] = {
    "minimax_m3_vl_text": {
        "plain": {**HALF, **MINIMAX_M3},
        "whole heads turned, one choice": {**HEAD, **MINIMAX_M3, "index_n_heads": 1, "index_head_dim": 16},
    },
    "qwen4_exp_text": {
        "plain": {**HALF, **DELTA, **QWEN4},
        "no n-grams, sigmoid": {
            **HALF,
            **DELTA,
            **QWEN4,
            "ple_layer_ids": [],
            "output_gate_type": "sigmoid",
            "indexer_budget": 256,
        },
    },
}
