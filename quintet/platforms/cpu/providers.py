"""Providers of each op on the CPU, best first; importing the modules registers them."""

from collections.abc import Mapping, Sequence

from quintet.platforms.cpu.ops import (  # noqa: F401
    attention,
    compressed,
    elementwise,
    embedding,
    float8,
    heads,
    linear,
    lora,
    moe,
    norm,
    quantized,
    quantized_embedding,
    quantized_moe,
    rotary,
    sampling,
    states,
    streams,
    torch_attention,
    torch_ops,
)

PRIORITY: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("linear", "paged_attention", "activate", "gated", "experts"), ("native", "torch")),
    # but gumbel, which is the specification's to the last bit
    **dict.fromkeys(("greedy", "sample", "top_logprobs", "filter_logits", "widen", "scale_logits"), ("native",)),
    **dict.fromkeys(("penalize", "bias_tokens", "ban_tokens", "keep_tokens"), ("native",)),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "rotary", "norm_rotary", "pair_rotary"), ("native",)),
    **dict.fromkeys(("embedding", "quantized_embedding", "take_rows", "place_rows"), ("native",)),
    **dict.fromkeys(("choose_rows", "beside"), ("native",)),
    **dict.fromkeys(("attention", "biased_attention"), ("native",)),
    **dict.fromkeys(("add", "scale", "scale_heads", "softcap", "write_kv"), ("native",)),
    **dict.fromkeys(("short_conv", "state_space", "selective_scan", "delta_rule", "kimi_delta_rule"), ("native",)),
    **dict.fromkeys(("gated_norm", "sigmoid_gate"), ("native",)),
    **dict.fromkeys(("route", "route_grouped", "route_limited", "grouped_linear"), ("native",)),
    **dict.fromkeys(("predict_streams", "correct_streams", "as_large", "keep_above", "known_ids"), ("native",)),
    **dict.fromkeys(("stream_gates", "collapse_streams", "expand_streams", "repeat_streams"), ("native",)),
    **dict.fromkeys(("route_sparse", "scale_rows", "local_experts", "count_experts"), ("native",)),
    **dict.fromkeys(("add_lora", "scale_adapted", "adapter_rows", "lora_experts"), ("native",)),
    **dict.fromkeys(("choose_pools", "choose_tokens", "chosen_attention"), ("torch",)),
    **dict.fromkeys(("recent_rows", "pool_windows", "write_entries", "choose_entries"), ("torch",)),
    **dict.fromkeys(("compressed_attention", "rotate_last", "route_softplus", "route_hashed"), ("torch",)),
    "quantized_experts": ("native",),
    "biased_experts": ("native", "torch"),
    "by_heads": ("native", "torch"),
    "ungated_experts": ("native", "torch"),
}
