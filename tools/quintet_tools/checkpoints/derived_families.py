"""Families that are made of what those of tiny.FAMILIES are made of: their logits are compared, and no more."""

from typing import Any

from quintet.conformance.harness.reference_model import LENGTH, VOCAB
from quintet_tools.checkpoints.block_sparse_families import BLOCK_SPARSE
from quintet_tools.checkpoints.hyper_families import GROUPED, HYPER_CONNECTED, SPARSE
from quintet_tools.checkpoints.scaled_families import SCALED_VARIANTS
from quintet_tools.checkpoints.sizes import (
    DELTA,
    GEMMA_4_VARIANTS,
    INKLING_VARIANTS,
    LATENT,
    LFM3,
    PLAIN,
    SPACES,
    WINDOW,
)

HEAD = {**PLAIN, "head_dim": 16}
HALF = {**HEAD, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
WINDOWS = {**HEAD, "sliding_window": WINDOW}
MIXED = {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ENDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
GPT = {**ENDS, "n_positions": LENGTH, "n_embd": 48, "n_layer": 3, "n_head": 4}
GPT_NEO = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "max_position_embeddings": LENGTH,
    "window_size": WINDOW, "attention_types": [[["global", "local", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BLOOM = {**ENDS, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": LENGTH}
MPT = {**ENDS, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": LENGTH}
XGLM = {
    "vocab_size": VOCAB, "d_model": 48, "ffn_dim": 77, "num_layers": 3, "attention_heads": 4,
    "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
GROWING = {  # every 16 positions, queries grow
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
KIMI_LINEAR = {
    "num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_head_dim": 12,
    "linear_num_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 61,
}  # fmt: skip
KIMI_GROUPS = {
    "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "q_lora_rank": 28, "attention_bias": True,
    "mlp_layer_types": ["sparse", "dense", "sparse"], "linear_conv_kernel_dim": 3,
}  # fmt: skip
LING_3 = {
    **{name: value for name, value in KIMI_LINEAR.items() if not name.startswith(("q_lora", "linear"))}, "head_dim": 12,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "kda_lower_bound": -2.0,
}  # fmt: skip
OLMO_HYBRID = {**PLAIN, **DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
OLMO_ROTARY = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": True,
    "linear_allow_neg_eigval": False, "linear_num_key_heads": 6, "linear_conv_kernel_dim": 3,
}  # fmt: skip
MODERN = {**PLAIN, "local_attention": 2 * WINDOW, "tie_word_embeddings": True, "cls_token_id": 1, "sep_token_id": 2}
MODERN_BIASED = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
LFM2_MOE = {
    "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 7,
    "num_experts_per_tok": 3, "moe_intermediate_size": 61, "routed_scaling_factor": 1.5,
}  # fmt: skip
LIGHTNING = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "block_size": 16,
    "full_attn_alpha_factor": 1.5, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 0.8,
    "mlp_beta_factor": 1.2,
}  # fmt: skip
NEMOTRON_H = {
    **PLAIN,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "head_dim": 16,
    "time_step_min": 0.3,  # so that some are less
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 58,
    "moe_shared_expert_intermediate_size": 71,
    "routed_scaling_factor": 1.5,
}
PLAMO2 = {
    **{name: value for name, value in PLAIN.items() if name != "tie_word_embeddings"}, "tie_word_embeddings": True,
    "num_hidden_layers": 4, "hidden_size_per_head": 16, "mamba_num_heads": 4, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_step": 2, "attention_window_size": WINDOW, "full_attention_idx": [], "rms_norm_eps": 1e-5,
}  # fmt: skip
RWKV7 = {
    "vocab_size": VOCAB, "hidden_size": 48, "head_dim": 8, "num_hidden_layers": 3, "intermediate_size": 77,
    "decay_low_rank_dim": 5, "a_low_rank_dim": 6, "v_low_rank_dim": 4, "gate_low_rank_dim": 7, "norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
ZAMBA2 = {
    **{name: value for name, value in PLAIN.items() if name != "num_key_value_heads"},
    "num_hidden_layers": 4,
    "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "tie_word_embeddings": True,
    "adapter_rank": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "chunk_size": 16,
    "time_step_min": 0.3,  # so that some are less
}
CHOSEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 61}
SCALED = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.5,
}  # fmt: skip
COHERE_MOE = {
    **WINDOWS, "sliding_window_pattern": 2, "num_experts": 5, "num_experts_per_tok": 2, "logit_scale": 0.5,
}  # fmt: skip

SKIPS = {
    "num_hidden_layers": 5,
    "bskcn_1": [1],
    "bskcn_2": [1, 2],
    "bskcn_3": [3],
    "bskcn_4": [4],
    "bskcn_tv": [0.9, 0.7],
}
CHATGLM = {
    "padded_vocab_size": VOCAB, "vocab_size": VOCAB - 1, "hidden_size": 48, "ffn_hidden_size": 77, "num_layers": 3,
    "num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 12,
    "seq_length": LENGTH, "layernorm_epsilon": 1e-5, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True,
    "original_rope": True, "post_layer_norm": True, "tie_word_embeddings": False,
}  # fmt: skip
BAICHUAN = {
    name: value for name, value in PLAIN.items() if name not in ("num_key_value_heads", "max_position_embeddings")
}
LING = {
    "num_experts": 8, "num_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 61, "head_dim": 16,
    "use_bias": False, "use_qkv_bias": False, "rope_theta": 600000.0, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1}

# family -> variant -> what its config is made of
KIN: dict[str, dict[str, dict[str, Any]]] = {
    "bamba": {
        "plain": {**PLAIN, **SPACES, "attn_layer_indices": [1], "num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "falcon_h1": {
        "plain": {
            **PLAIN,
            **SPACES,
            "mamba_d_ssm": 72,
            "ssm_multipliers": [0.7, 1.2, 0.9, 1.3, 0.8],
            "mlp_multipliers": [0.7, 1.3],
            **{f"{name}_multiplier": 0.9 for name in ("ssm_in", "ssm_out", "attention_out", "key", "lm_head")},
        },
        "normalised": {**PLAIN, **SPACES, "mamba_d_ssm": 96, "mamba_rms_norm": True, "projectors_bias": True},
    },
    "falcon_mamba": {"plain": {**PLAIN, "state_size": 5, "use_bias": True}},
    "jamba": {
        "plain": {
            **PLAIN,
            "num_experts": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 5,
        },
    },
    "bailing_hybrid": {
        "plain": {**PLAIN, **LING_3},
        "unbounded decays": {**PLAIN, **LING_3, "kda_safe_gate": False, "short_conv_kernel_size": 3},
    },
    "lfm2_moe": {
        "plain": {**PLAIN, **LFM2_MOE},
        "no bias": {**PLAIN, **LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "conv_bias": True},
    },
    **GEMMA_4_VARIANTS,
    **BLOCK_SPARSE,
    **SCALED_VARIANTS,
    "lfm3": {
        "plain": {**PLAIN, **LFM3},
        "no gates, one norm": {**PLAIN, **LFM3, "use_attention_gate": False, "use_sandwich_norm": False},
    },
    "kimi_linear": {
        "plain": {**PLAIN, **KIMI_LINEAR},
        "groups of experts, a latent of q, biased": {**PLAIN, **KIMI_LINEAR, **KIMI_GROUPS},
    },
    "minimax": {
        "plain": {**PLAIN, **EXPERTS, **LIGHTNING, "head_dim": 16},
        "window": {**PLAIN, **EXPERTS, **LIGHTNING, "sliding_window": WINDOW},
    },
    "nemotron_h": {
        "plain": NEMOTRON_H,
        "latent experts, biased": {
            **NEMOTRON_H,
            "moe_latent_size": 32,
            "use_bias": True,
            "mlp_bias": True,
            "norm_topk_prob": False,
            "n_group": 4,
            "topk_group": 2,
            "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"],
        },
    },
    "zamba2": {
        "plain": {**ZAMBA2, "use_mem_rope": True, "use_shared_attention_adapter": True},
        "no adapters of attention, biased": {**ZAMBA2, "add_bias_linear": True, "num_mem_blocks": 1},
    },
    "plamo2": {
        "plain": PLAMO2,
        "full attention, untied": {**PLAMO2, "full_attention_idx": [1], "tie_word_embeddings": False},
    },
    "rwkv7": {"plain": RWKV7},
    "qwen3_5_moe_text": {
        "plain": {
            **HEAD,
            "num_hidden_layers": 2,  # of three, transformers itself is 1e-4 from float64
            **DELTA,
            **CHOSEN,
            "full_attention_interval": 2,
            "shared_expert_intermediate_size": 71,
        },
    },
    "qwen3_5_text": {"plain": {**PLAIN, **DELTA, "full_attention_interval": 2, "head_dim": 16}},
    "apertus": {"plain": {**PLAIN, "rope_parameters": LLAMA3}},
    "arcee": {"plain": PLAIN},
    "baichuan": {
        "rotary": {**BAICHUAN, "max_position_embeddings": LENGTH},
        "slopes, normalised head": {**BAICHUAN, "model_max_length": LENGTH, "z_loss_weight": 0},
    },
    "bailing_moe": {
        "plain": {**PLAIN, **LING},
        "normalised head, one dense": {
            **PLAIN,
            **LING,
            "use_qkv_bias": True,
            "norm_topk_prob": False,
            "norm_head": True,
            "first_k_dense_replace": 1,
        },
    },
    "bailing_moe_v2": {
        "plain": {
            **PLAIN,
            **LING,
            **GROUPS,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "partial_rotary_factor": 0.5,
        },
    },
    "bloom": {"plain": BLOOM},
    "chatglm": {"plain": CHATGLM, "longer": {**CHATGLM, "rope_ratio": 50, "add_qkv_bias": False}},
    "codegen": {"plain": {**GPT, "rotary_dim": 6, "n_head": 8}},
    "cohere": {"norms of heads": {**PLAIN, "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}},
    "cwm": {"plain": {**WINDOWS, "rope_parameters": LLAMA3}},
    "ernie4_5": {"biased": {**HEAD, "use_bias": True, "tie_word_embeddings": True}},
    "exaone4": {
        "windows": {**PLAIN, "sliding_window": WINDOW, "sliding_window_pattern": 2},
        "no windows": {**PLAIN, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    },
    "exaone": {
        "plain": {
            **{name: value for name, value in HEAD.items() if name != "num_hidden_layers"},
            "num_layers": 3,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 1e6,
            "rope_scaling": {name: value for name, value in LLAMA3.items() if name != "rope_theta"},
        }
    },
    "biogpt": {"plain": {**PLAIN, "tie_word_embeddings": True}, "unscaled": {**PLAIN, "scale_embedding": False}},
    "openai-gpt": {"plain": GPT, "silu": {**GPT, "afn": "silu"}},
    "falcon": {
        "one KV head": {**PLAIN, "bias": True},
        "few KV heads": {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 3, "tie_word_embeddings": True},
    },
    "flex_olmo": {
        "plain": {**PLAIN, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
    },
    "gemma": {"plain": {**HEAD, "tie_word_embeddings": True}},
    "glm": {"plain": {**HALF, "attention_bias": True}},
    "glm4": {"plain": HALF},
    "gpt_bigcode": {"one KV head": GPT, "many": {**GPT, "multi_query": False, "n_inner": 50}},
    "gpt_neo": {"plain": GPT_NEO},
    "gpt_neox_japanese": {"plain": {**PLAIN, "intermediate_multiple_size": 2, "rotary_pct": 0.5}},
    "gpt_neox": {"parallel": PLAIN, "serial": {**PLAIN, "use_parallel_residual": False, "attention_bias": False}},
    "gptj": {"plain": {**GPT, "rotary_dim": 6}},
    "helium": {"plain": {**PLAIN, "head_dim": 8}},
    "hunyuan_v1_dense": {"alpha": {**HEAD, "attention_bias": True, "rope_parameters": ALPHA}},
    "hunyuan_v1_moe": {"plain": {**HEAD, "num_experts": 5, "moe_topk": [2, 2, 3], "rope_parameters": ALPHA}},
    "inkling_text": INKLING_VARIANTS,
    "internlm": {"plain": {**PLAIN, "num_key_value_heads": 6, "bias": True}},
    "internlm2": {"plain": {**PLAIN, "bias": False}, "biased": {**PLAIN, "bias": True, "rope_theta": 1e6}},
    **HYPER_CONNECTED,
    "internlm3": {"plain": HEAD},
    "iquestcoder": {"plain": HEAD},
    "jais2": {"plain": {**PLAIN, "head_dim": 8}},
    "mimo": {"plain": {**HEAD, "num_nextn_predict_layers": 1, "rope_theta": 640000.0}},
    "hyperclovax": {
        "plain": {**PLAIN, **SCALED},
        "no norms behind": {**PLAIN, **SCALED, "use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    },
    "minicpm3": {
        "plain": {**PLAIN, **LATENT, "dim_model_base": 16},
        "no latent of q": {**PLAIN, **LATENT, "q_lora_rank": None, "scale_depth": None, "mlp_bias": True},
    },
    "ministral": {"plain": MIXED},
    "ministral3": {"plain": {**HEAD, "sliding_window": None, "rope_parameters": GROWING}},
    "mpt": {"plain": MPT, "clipped": {**MPT, "n_heads": 4, "attn_config": {"clip_qkv": 0.5}}},
    "nanochat": {"plain": PLAIN, "biased": {**PLAIN, "attention_bias": True, "final_logit_softcapping": None}},
    "modernbert-decoder": {"plain": MODERN, "biased": {**MODERN, **MODERN_BIASED, "tie_word_embeddings": False}},
    "nemotron": {"biased": {**HALF, "attention_bias": True, "mlp_bias": True}},
    "olmo": {"clipped": {**PLAIN, "clip_qkv": 0.5}},
    "olmo3": {"plain": MIXED},
    "olmo_hybrid": {"plain": OLMO_HYBRID, "rotary, biased, beta below 1": {**OLMO_HYBRID, **OLMO_ROTARY}},
    "persimmon": {"plain": PLAIN},
    "phi": {"plain": PLAIN, "norms of heads": {**PLAIN, "qk_layernorm": True}},
    "seed_oss": {"plain": {**HEAD, "attention_bias": True}},
    "solar": {"plain": {**PLAIN, **SKIPS}},
    "stablelm": {
        "plain": PLAIN,
        "parallel": {**PLAIN, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    },
    "starcoder2": {"plain": WINDOWS},
    "xglm": {"plain": XGLM, "unscaled": {**XGLM, "scale_embedding": False, "tie_word_embeddings": False}},
    "axk2": {"plain": {**PLAIN, **GROUPED, **SPARSE, "gated_norm_rank": 5, "index_topk": LENGTH}},
    "deepseek_v32": {"plain": {**PLAIN, **GROUPED, **SPARSE, "index_topk": LENGTH}},
    "glm_moe_dsa": {"plain": {**PLAIN, **GROUPED, **SPARSE, "n_group": 1, "topk_group": 1}},
    "vaultgemma": {"plain": {**WINDOWS, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}},
    "glm4_moe": {
        "plain": {**PLAIN, **GROUPED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
        "no norms": {**PLAIN, **GROUPED, "head_dim": 12, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    },
    "afmoe": {
        "plain": {
            **WINDOWS,
            **CHOSEN,
            "global_attn_every_n_layers": 2,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    },
    "cohere2_moe": {
        "averaged": {
            **COHERE_MOE,
            "num_shared_experts": 2,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 50,
            "tie_word_embeddings": True,
        },
        "sigmoid, added": {
            **COHERE_MOE,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
    },
    "exaone_moe": {
        "windows": {
            **WINDOWS,
            **CHOSEN,
            "sliding_window_pattern": 2,
            "num_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
        },
    },
    "glm4_moe_lite": {"plain": {**PLAIN, **LATENT, "mlp_layer_types": ["sparse", "dense", "sparse"]}},
    "solar_open": {"plain": {**HEAD, **GROUPED, "attention_bias": True}},
    "dots1": {"plain": {**PLAIN, **GROUPED, "head_dim": 16, "sliding_window": WINDOW, "max_window_layers": 1}},
    "minimax_m2": {"plain": {**PLAIN, **EXPERTS, "head_dim": 16, "rotary_dim": 8}},
    "granitemoe": {
        "plain": {
            **PLAIN,
            **EXPERTS,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        }
    },
    "ernie4_5_moe": {
        "plain": {
            **PLAIN,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 61,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        }
    },
}
