"""Random small configs of every family, for hypothesis."""

from typing import Any

from hypothesis import strategies as st

from quintet_tools.checkpoints.derived_families import KIN
from quintet_tools.checkpoints.tiny import LENGTH, VOCAB

KINDS = st.sampled_from(["sliding_attention", "full_attention"])
FREE_HEAD_DIM = (
    "llama",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "llama4_text",
)  # heads * head_dim need not be the hidden size


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Odd head counts, any GQA ratio, windows shorter than prompts, tied and untied heads, with and without biases."""
    kv_heads, group, layers = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    least = 4 if family == "gemma3n_text" else 1  # norms of two features enlarge rounding from stream to stream
    heads, head_dim = kv_heads * group, 2 * draw(st.integers(least, 12))
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


@st.composite
def kin_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A variant of a family whose parts others have too, with other numbers of heads and features."""
    settings = dict(draw(st.sampled_from(list(KIN[family].values()))))
    heads, kv_heads, dim = (
        draw(st.sampled_from([4, 8])),
        draw(st.sampled_from([1, 2, 4])),
        8 if family == "stablelm" else draw(st.sampled_from([8, 12])),  # StableLM rotates a quarter: an even number
    )
    kv_heads = heads if "kv_lora_rank" in settings else kv_heads
    sizes = {"num_key_value_heads": kv_heads, "num_kv_heads": kv_heads, "intermediate_size": draw(st.integers(3, 90))}
    sizes |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), heads)
    sizes |= dict.fromkeys(("hidden_size", "n_embd", "d_model"), heads * settings.get("head_dim", dim))
    return settings | {name: size for name, size in sizes.items() if name in settings}


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


def _llama4(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "no_rope_layers": st.lists(st.integers(0, 1), min_size=layers, max_size=layers),
            "attention_chunk_size": st.integers(1, 20),
            "interleave_moe_layer_step": st.integers(1, 2),
            "intermediate_size_mlp": st.integers(3, 40),
            "num_local_experts": st.integers(1, 5),
            "use_qk_norm": st.booleans(),
            "floor_scale": st.integers(1, 30),
            "attention_bias": st.booleans(),
        }
    )


@st.composite
def _gemma3n(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    """Layers that read come last, and each has one of its kind before them."""
    own, reading = draw(st.lists(KINDS, min_size=1, max_size=3)), draw(st.integers(0, 2))
    kinds = own + draw(st.lists(st.sampled_from(own), min_size=reading, max_size=reading))
    streams = draw(st.integers(2, 4))
    sizes = {"hidden_size_per_layer_input": draw(st.integers(1, 12)), "laurel_rank": draw(st.integers(1, 9))}
    shares = st.lists(st.sampled_from([0.0, 0.5, 0.95]), min_size=len(kinds), max_size=len(kinds))
    return {
        **sizes,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_kv_shared_layers": reading,
        "sliding_window": draw(st.integers(1, 12)),
        "activation_sparsity_pattern": draw(shares),
        "altup_num_inputs": streams,
        "altup_active_idx": draw(st.integers(0, streams - 1)),
        "vocab_size_per_layer_input": VOCAB - draw(st.integers(0, 5)),
    }


def _phimoe(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    own = {"num_local_experts": st.integers(2, 9), "router_jitter_noise": st.sampled_from([0.01, 0.2])}
    return st.fixed_dictionaries({**own, "attention_bias": st.booleans()})


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


def _lfm2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["conv", "full_attention"])
    return st.fixed_dictionaries(
        {
            "layer_types": st.lists(kinds, min_size=layers, max_size=layers),
            "conv_bias": st.booleans(),
            "conv_L_cache": st.integers(2, 5),
            "block_auto_adjust_ff_dim": st.booleans(),
            "block_multiple_of": st.integers(1, 9),
        }
    )


def _spaces(layers: int, prefix: str, names: tuple[str, str, str]) -> st.SearchStrategy[dict[str, Any]]:
    """Heads that are a multiple of the groups; their features make up twice the hidden size, which here is given."""

    def sized(groups: int, more: int, state: int, taps: int, bias: bool) -> dict[str, Any]:
        heads, group, of = names
        sizes = {heads: 2 * groups * more, group: groups, of: state, "hidden_size": 8 * groups * more}
        return {**sizes, f"{prefix}conv_bias": bias, "num_attention_heads": 2 * more, "num_key_value_heads": more}

    return st.builds(sized, *[st.integers(1, 3)] * 2, st.integers(1, 9), st.integers(2, 5), st.booleans())


def _mamba2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    sizes = _spaces(layers, "use_", ("num_heads", "n_groups", "state_size"))
    return sizes.map(lambda own: {**own, "head_dim": 8, "num_attention_heads": 1, "num_key_value_heads": 1})


def _granite_4(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.sampled_from(["linear_attention", "full_attention"])
    own = st.fixed_dictionaries(
        {
            "layer_types": st.lists(kinds, min_size=layers, max_size=layers),
            "shared_intermediate_size": st.integers(3, 40),
            "num_local_experts": st.sampled_from([0, 3]),
        }
    )
    sizes = _spaces(layers, "mamba_", ("mamba_n_heads", "mamba_n_groups", "mamba_d_state"))
    return st.builds(lambda a, b: {**a, **b}, sizes, own)


def _mamba(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    flags = st.fixed_dictionaries({name: st.booleans() for name in ("use_bias", "use_conv_bias")})
    sizes = st.fixed_dictionaries({"state_size": st.integers(1, 9), "conv_kernel": st.integers(2, 5)})
    return st.builds(lambda a, b: {**a, **b, "num_attention_heads": 1, "num_key_value_heads": 1}, flags, sizes)


def _delta(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    def sized(keys: int, more: int, width: int, value: int, interval: int) -> dict[str, Any]:
        heads = {"linear_num_key_heads": keys, "linear_num_value_heads": keys * more}
        sizes = {"linear_key_head_dim": width, "linear_value_head_dim": value, "head_dim": 16}
        return {**heads, **sizes, "full_attention_interval": interval}

    return st.builds(sized, *[st.integers(1, 3)] * 2, st.integers(1, 20), st.integers(1, 20), st.integers(1, 2))


def _qwen3_next(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda a, b: {**a, **b}, _qwen2_moe(layers), _delta(layers)).map(
        lambda own: {**own, "use_sliding_window": False}
    )


def _cohere2(layers: int) -> st.SearchStrategy[dict[str, Any]]:
    kinds = st.lists(KINDS, min_size=layers, max_size=layers)
    own = {"layer_types": kinds, "sliding_window": st.integers(1, 12), "attention_bias": st.booleans()}
    return st.fixed_dictionaries({**own, "logit_scale": st.floats(0.3, 2.0)})


_OWN = {
    "cohere2": _cohere2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma,
    "gemma3n_text": _gemma3n,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoehybrid": _granite_4,
    "mamba": _mamba,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
    "mamba2": _mamba2,
    "llama": _llama,
    "llama4_text": _llama4,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
