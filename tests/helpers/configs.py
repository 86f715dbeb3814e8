"""Random small configs of every family, for hypothesis."""

from typing import Any

from hypothesis import strategies as st

from quintet.conformance.tiny import LENGTH, VOCAB

KINDS = st.sampled_from(["sliding_attention", "full_attention"])
FREE_HEAD_DIM = (
    "llama",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3_text",
)  # heads * head_dim need not be the hidden size


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Odd head counts, any GQA ratio, windows shorter than prompts, tied and untied heads, with and without biases."""
    kv_heads, group, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * group, 2 * draw(st.integers(1, 12))
    common = {
        "vocab_size": VOCAB,
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw(st.integers(3, 90)),
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family in FREE_HEAD_DIM:
        common |= {"hidden_size": heads * draw(st.integers(1, 9)), "head_dim": head_dim}
    return common | draw(_OWN[family](layers))


def _llama(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"attention_bias": st.booleans(), "mlp_bias": st.booleans()})


def _mistral(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"sliding_window": st.none() | st.integers(1, 12)})


def _phi3(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"sliding_window": st.none() | st.integers(1, 12)})


def _qwen(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "use_sliding_window": st.booleans(),
            "sliding_window": st.integers(1, 12),
            "max_window_layers": st.integers(0, layers),
        }
    )


def _gemma(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "layer_types": st.lists(KINDS, min_size=layers, max_size=layers),
            "sliding_window": st.integers(1, 12),
            "query_pre_attn_scalar": st.integers(1, 40),
            "final_logit_softcapping": st.sampled_from([None, 5.0, 30.0]),
            "attention_bias": st.booleans(),
        }
    )


def _gemma2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    capped = st.fixed_dictionaries({"attn_logit_softcapping": st.sampled_from([None, 4.0, 50.0])})
    return st.builds(lambda a, b: {**a, **b}, _gemma(layers), capped)


def _gpt2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    flags = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    return st.fixed_dictionaries({flag: st.booleans() for flag in flags} | {"n_inner": st.none() | st.integers(3, 90)})


def _opt(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "do_layer_norm_before": st.booleans(),
            "enable_bias": st.booleans(),
            "layer_norm_elementwise_affine": st.booleans(),
            "word_embed_proj_dim": st.none() | st.integers(8, 40),
            "ffn_dim": st.integers(3, 90),
        }
    )


def _granite(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
    return st.fixed_dictionaries(
        {name: st.floats(0.1, most) for name, most in multipliers.items()}
        | {"logits_scaling": st.floats(0.5, 2.0), "attention_bias": st.booleans(), "mlp_bias": st.booleans()}
    )


def _olmo2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"attention_bias": st.booleans()})


def _mixtral(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"num_local_experts": st.integers(2, 9), "num_experts_per_tok": st.integers(1, 2)}
    return st.fixed_dictionaries({**sizes, "sliding_window": st.none() | st.integers(1, 12)})


def _qwen3_moe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "num_experts": st.integers(3, 9),
            "num_experts_per_tok": st.integers(1, 3),
            "moe_intermediate_size": st.integers(1, 40),
            "norm_topk_prob": st.booleans(),
            "decoder_sparse_step": st.integers(1, 2),
            "mlp_only_layers": st.lists(st.integers(0, layers - 1), max_size=1),
            "attention_bias": st.booleans(),
        }
    )


def _qwen2_moe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    shared = {"shared_expert_intermediate_size": st.integers(1, 40), "qkv_bias": st.booleans()}
    own = st.fixed_dictionaries({**shared, "use_sliding_window": st.booleans(), "sliding_window": st.integers(1, 12)})
    return st.builds(lambda a, b: {**a, **b}, _qwen3_moe(layers), own)


def _latent(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    experts = st.sampled_from([(8, 4, 2), (6, 1, 1), (9, 3, 3)]).map(
        lambda sizes: dict(zip(("n_routed_experts", "n_group", "topk_group"), sizes, strict=True))
    )
    own = st.fixed_dictionaries(
        {
            "q_lora_rank": st.none() | st.integers(3, 30),
            "kv_lora_rank": st.integers(2, 35).map(lambda half: 2 * half),  # transformers turns slices, of pairs
            "qk_nope_head_dim": st.integers(1, 10).map(lambda half: 2 * half),
            "qk_rope_head_dim": st.integers(1, 8).map(lambda half: 2 * half),
            "v_head_dim": st.integers(1, 70),
            "first_k_dense_replace": st.integers(0, layers),
            "num_experts_per_tok": st.integers(1, 3),
            "moe_intermediate_size": st.integers(1, 40),
            "n_shared_experts": st.integers(1, 2),
            "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
            "num_key_value_heads": st.none(),
        }
    )
    return st.builds(lambda a, b: {**a, **b}, experts, own)


def _deepseek_v2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = st.fixed_dictionaries({"topk_method": st.sampled_from(["greedy", "group_limited_greedy"])})
    return st.builds(lambda a, b: {**a, **b}, _latent(layers), own)


def _deepseek_v3(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = st.fixed_dictionaries({"norm_topk_prob": st.booleans(), "rope_interleave": st.booleans()})
    return st.builds(lambda a, b: {**a, **b}, _latent(layers), own)


def _grouped(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    experts = st.sampled_from([(8, 4, 2), (6, 1, 1), (9, 3, 3)]).map(
        lambda sizes: dict(zip(("n_routed_experts", "n_group", "topk_group"), sizes, strict=True))
    )
    own = st.fixed_dictionaries(
        {
            "first_k_dense_replace": st.integers(0, layers),
            "num_experts_per_tok": st.integers(1, 3),
            "moe_intermediate_size": st.integers(1, 40),
            "n_shared_experts": st.integers(1, 2),
            "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
            "norm_topk_prob": st.booleans(),
            "attention_bias": st.booleans(),
            "head_dim": st.integers(1, 6).map(lambda quarter: 4 * quarter),
            "use_qk_norm": st.booleans(),
        }
    )
    return st.builds(lambda a, b: {**a, **b}, experts, own)


def _dots1(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = st.fixed_dictionaries({"sliding_window": st.integers(1, 12), "max_window_layers": st.integers(0, layers)})
    plain = _grouped(layers).map(lambda given: {k: v for k, v in given.items() if k != "use_qk_norm"})
    return st.builds(lambda a, b: {**a, **b}, plain, own)


def _minimax_m2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"num_local_experts": st.integers(2, 9), "num_experts_per_tok": st.integers(1, 2)}
    turned = st.sampled_from([(8, 8), (16, 8), (12, 4)]).map(lambda of: {"head_dim": of[0], "rotary_dim": of[1]})
    return st.builds(lambda a, b: {**a, **b}, st.fixed_dictionaries(sizes), turned)


def _gpt_oss(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "num_local_experts": st.integers(2, 9),
            "num_experts_per_tok": st.integers(1, 2),
            "head_dim": st.integers(1, 12).map(lambda half: 2 * half),
            "sliding_window": st.integers(1, 12),
            "layer_types": st.lists(KINDS, min_size=layers, max_size=layers),
            "swiglu_limit": st.sampled_from([0.7, 7.0]),
            "attention_bias": st.booleans(),
        }
    )


def _granitemoe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"num_local_experts": st.integers(2, 9), "num_experts_per_tok": st.integers(1, 2)}
    plain = _granite(layers).map(lambda given: {k: v for k, v in given.items() if k != "mlp_bias"})
    return st.builds(lambda a, b: {**a, **b}, plain, st.fixed_dictionaries(sizes))


def _ernie4_5_moe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "moe_num_experts": st.integers(3, 9),
            "moe_k": st.integers(1, 3),
            "moe_intermediate_size": st.integers(1, 40),
            "moe_num_shared_experts": st.integers(0, 2),
            "moe_layer_start_index": st.integers(0, layers - 1),
            "moe_layer_interval": st.integers(1, 2),
        }
    )


def _olmoe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = {"num_experts": st.integers(3, 9), "num_experts_per_tok": st.integers(1, 3)}
    return st.fixed_dictionaries({**sizes, "norm_topk_prob": st.booleans(), "attention_bias": st.booleans()})


def _smollm3(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "no_rope_layers": st.lists(st.integers(0, 1), min_size=layers, max_size=layers),
            "use_sliding_window": st.booleans(),
            "sliding_window": st.integers(1, 12),
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
        }
    )


_OWN = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _grouped,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "llama": _llama,
    "mistral": _mistral,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
