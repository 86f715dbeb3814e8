"""Arguments of attention's ops, and of those that write and choose what it reads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import AttentionSpec, HeadNorms, RotaryArgs
from quintet.ops.registry import Op


def write_kv(dtype: torch.dtype) -> Iterator[Case]:
    for page_size in (8, 16, 32):
        of = spec(6, 3, 8, dtype=dtype, page_size=page_size)
        cache = RandomKVCache(of, [45, 9, page_size])
        requests = [AttentionRequest(37, 8), AttentionRequest(8, 1), AttentionRequest(0, page_size)]
        q, context = cache.batch(dict(enumerate(requests)))
        k, v = randn(len(q), 3, 8, dtype=dtype), randn(len(q), 3, 8, dtype=dtype, scale=2.0)
        yield f"pages of {page_size}", (cache.kv, k, v, context)


def rotary_write_kv(dtype: torch.dtype) -> Iterator[Case]:
    for what, (kv, k, v, context) in write_kv(dtype):
        q, norms = randn(len(k), 6, 8, dtype=dtype, scale=3.0), (randn(8, dtype=dtype), randn(1, 8, dtype=dtype)[0])
        for turned, offset, neighbours in ((8, None, False), (4, None, True), (4, 0.0, False), (8, 1.0, False)):
            angles = torch.arange(64)[:, None] * torch.linspace(0.1, 1, turned // 2)
            of = None if offset is None else HeadNorms(*norms, 1e-5, offset)
            turn = RotaryArgs(torch.cat([angles.cos(), angles.sin()], -1), of, neighbours)
            yield f"{what}, {turned} of 8 + {offset}, neighbours {neighbours}", (q, k, v, turn, kv, context)


MIXES = {
    "a long prompt": [AttentionRequest(0, 170)],
    "chunks": [AttentionRequest(100, 31), AttentionRequest(7, 2), AttentionRequest(250, 17)],
    "decoding": [AttentionRequest(cached, 1) for cached in (0, 63, 127, 128, 300)],
    "ragged mix": [AttentionRequest(*each) for each in ((40, 1), (0, 21), (130, 5), (270, 1), (3, 1))],
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "window of one": {"window": 1},
    "window over blocks": {"window": 140},
    "soft-cap": {"softcap": 3.0},
    "soft-cap, window": {"softcap": 20.0, "window": 33, "scale": 0.7},
    "sinks": {"sinks": True},
    "sinks, window": {"sinks": True, "window": 5},
}


def paged_attention(dtype: torch.dtype) -> Iterator[Case]:
    for what, settings in SPECS.items():
        for heads, kv_heads, page_size in ((6, 3, 16), (5, 1, 8), (3, 3, 32)):
            of = spec(heads, kv_heads, 16, dtype=dtype, page_size=page_size, **settings)
            sinks = randn(heads, dtype=dtype) if of.sinks else None
            for mix, requests in MIXES.items():
                yield (
                    f"{what}, {heads}/{kv_heads}, pages of {page_size}, {mix}",
                    paged_attention_arguments(of, requests, sinks),
                )


def paged_attention_arguments(
    of: AttentionSpec, requests: list[AttentionRequest], sinks: Tensor | None
) -> tuple[Any, ...]:
    cache = RandomKVCache(of, [r.cached + r.new for r in requests])
    q, context = cache.batch(dict(enumerate(requests)))
    return q, cache.kv, context, of, sinks


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Yields arguments of requests that are whole in the step."""
    for what, settings in {
        **SPECS,
        "both ways": {"causal": False},
        "both ways, window": {"causal": False, "window": 7},
        "both ways, alibi": {"causal": False, "alibi": True},
    }.items():
        for heads, kv_heads in ((6, 3), (5, 1)):
            of = spec(heads, kv_heads, 16, dtype=dtype, source="none", **settings)
            sinks = randn(heads, dtype=dtype) if of.sinks else None
            for lengths in ((21,), (3, 40, 1), (16, 16)):
                _, _, context, *_ = paged_attention_arguments(
                    of, [AttentionRequest(0, length) for length in lengths], None
                )
                q = randn(sum(lengths), heads, 16, dtype=dtype)
                k, v = (randn(sum(lengths), kv_heads, 16, dtype=dtype, scale=size) for size in (1.0, 2.0))
                yield f"{what}, {heads}/{kv_heads}, {lengths} tokens", (q, k, v, context.batch, of, sinks)


def biased_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Distances that the bias has a number for, and longer ones."""
    kinds: dict[str, dict[str, Any]] = {
        "both ways": {"causal": False},
        "both ways, window": {"causal": False, "window": 7},
        "causal, soft-cap": {"softcap": 3.0},
    }
    for what, settings in kinds.items():
        for heads, kv_heads in ((6, 3), (3, 3)):
            of = spec(heads, kv_heads, 16, dtype=dtype, source="none", **settings)
            for lengths, reach in (((21,), 30), ((3, 80, 1), 9), ((16, 16), 0)):
                _, _, context, *_ = paged_attention_arguments(
                    of, [AttentionRequest(0, length) for length in lengths], None
                )
                q = randn(sum(lengths), heads, 16, dtype=dtype)
                k, v = (randn(sum(lengths), kv_heads, 16, dtype=dtype, scale=size) for size in (1.0, 2.0))
                bias = randn(heads, 2 * reach + 1, dtype=torch.float32, scale=2.0)
                yield f"{what}, {heads}/{kv_heads}, {lengths} tokens, {reach} apart", (q, k, v, context.batch, of, bias)


def choose_tokens(dtype: torch.dtype) -> Iterator[Case]:
    """Fewer tokens than are seen, as many, and more."""
    for heads, page_size, count in ((3, 16, 5), (1, 8, 40), (8, 32, 200)):
        for mix, requests in MIXES.items():
            of = spec(heads, 1, 16, dtype=dtype, page_size=page_size, shared=16)
            q, keys, context, *_ = paged_attention_arguments(of, requests, None)
            weights = randn(len(q), heads, dtype=torch.float32)
            yield f"{count} tokens, {heads} heads, pages of {page_size}, {mix}", (q, weights, keys, context, count)


def choose_pools(dtype: torch.dtype) -> Iterator[Case]:
    """Fewer pools than are seen, and more; whole pages of them, and parts."""
    for pool, page_size, count in ((4, 16, 8), (3, 8, 9), (16, 32, 64), (1, 16, 5)):
        for mix, requests in MIXES.items():
            of = spec(3, 1, 16, dtype=dtype, page_size=page_size, shared=16)
            q, keys, context, *_ = paged_attention_arguments(of, requests, None)
            weights, offsets = randn(len(q), 3, dtype=torch.float32), randn(pool, 8, dtype=torch.float32)
            given = (q[..., :8].contiguous(), weights, keys, offsets, context, count)
            yield f"{count} tokens in pools of {pool}, pages of {page_size}, {mix}", given


def chosen_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Tokens that an indexer of one head chose."""
    for heads, page_size, count in ((6, 16, 5), (1, 8, 40), (3, 32, 200)):
        for mix, requests in MIXES.items():
            of = spec(heads, 1, 16, dtype=dtype, page_size=page_size, shared=12, chosen=count)
            q, kv, context, *_ = paged_attention_arguments(of, requests, None)
            one = torch.ones(len(q), 1)
            chosen = Op.registry["choose_tokens"].reference(q[:, :1], one, kv, context, count)
            what = f"{count} tokens, {heads} heads, pages of {page_size}, {mix}"
            yield what, (q, kv, chosen, context, of, None)
            sinks = randn(heads, dtype=torch.float32)
            yield f"{what}, sinks", (q, kv, chosen, context, replace(of, sinks=True), sinks)


ATTENTION_OPS: dict[str, Cases] = {
    "attention": attention,
    "biased_attention": biased_attention,
    "choose_pools": choose_pools,
    "choose_tokens": choose_tokens,
    "chosen_attention": chosen_attention,
    "paged_attention": paged_attention,
    "rotary_write_kv": rotary_write_kv,
    "write_kv": write_kv,
}
