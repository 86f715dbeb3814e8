"""Arguments of attention's ops, and of those that write and choose what it reads."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import AttentionSpec, BlockChoiceSpec, HeadNorms, RotaryArgs
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


def disentangled_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Distances within columns and beyond them, of queries, of keys and of both."""
    for kinds, causal in (((True, True), False), ((True, False), False), ((False, True), True)):
        of = spec(3, 3, 16, dtype=dtype, source="none", causal=causal)
        for lengths, reach, count in (((21,), 30, 60), ((3, 80, 1), 9, 7), ((16, 16), 1, 2)):
            _, _, context, *_ = paged_attention_arguments(of, [AttentionRequest(0, length) for length in lengths], None)
            q, k, v = (randn(sum(lengths), 3, 16, dtype=dtype) for _ in range(3))
            mine, theirs = (randn(sum(lengths), 3, count, dtype=dtype, scale=2.0) if kind else None for kind in kinds)
            columns = torch.arange(2 * reach + 1).mul(5).remainder(count).to(torch.int32)
            what = f"{kinds}, causal {causal}, {lengths} tokens, {reach} apart"
            yield what, (q, k, v, context.batch, of, mine, theirs, columns)


def paged_distance_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Distances with a number and those without, windows that are as long and shorter."""
    for what, settings in {"plain": {}, "window": {"window": 9}, "window over blocks": {"window": 140}}.items():
        for heads, kv_heads, page_size, count in ((6, 3, 16, 9), (5, 1, 8, 200)):
            of = spec(heads, kv_heads, 16, dtype=dtype, page_size=page_size, distances=count, **settings)
            for mix, requests in MIXES.items():
                q, kv, context, *_ = paged_attention_arguments(of, requests, None)
                numbers = randn(len(q), heads, count, dtype=dtype, scale=2.0)
                yield f"{what}, {heads}/{kv_heads}, {count} distances, {mix}", (q, kv, numbers, context, of)


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


def choose_blocks(dtype: torch.dtype) -> Iterator[Case]:
    """Fewer blocks than are seen, as many, and more; blocks of a page, of several, and of a part."""
    for heads, page_size, block, count in ((3, 16, 16, 3), (1, 8, 32, 5), (4, 16, 4, 40)):
        for local in (0, 1, 2):
            of = BlockChoiceSpec("choose_blocks", 16, block, count, dtype, page_size, local)
            for mix, requests in MIXES.items():
                q, keys, context = _index_arguments(heads, page_size, requests, dtype)
                what = f"{count} blocks of {block}, {local} local, {heads} heads, pages of {page_size}, {mix}"
                yield what, (q, keys, context, of)


def choose_mean_blocks(dtype: torch.dtype) -> Iterator[Case]:
    angles = torch.arange(512)[:, None] * torch.linspace(0.1, 1, 4)
    norms = HeadNorms(randn(16, dtype=dtype), randn(16, dtype=dtype), 1e-6, 1.0)
    turn = RotaryArgs(torch.cat([angles.cos(), angles.sin()], -1), norms)
    for heads, page_size, block, count in ((3, 16, 16, 3), (1, 8, 32, 5), (4, 16, 4, 40)):
        of = BlockChoiceSpec("choose_mean_blocks", 16, block, count, dtype, page_size)
        for mix, requests in MIXES.items():
            q, keys, context = _index_arguments(heads, page_size, requests, dtype)
            yield f"{count} blocks of {block}, {heads} heads, pages of {page_size}, {mix}", (q, keys, turn, context, of)


def _index_arguments(
    heads: int, page_size: int, requests: list[AttentionRequest], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Any]:
    """Queries of an indexer, its keys, and the step."""
    of = spec(heads, 1, 16, dtype=dtype, page_size=page_size, shared=16)
    q, keys, context, *_ = paged_attention_arguments(of, requests, None)
    return q, keys, context


def block_sparse_attention(dtype: torch.dtype) -> Iterator[Case]:
    """Blocks of each KV head's own, or the same for all."""
    for heads, kv_heads, page_size, block, count in ((6, 3, 16, 16, 3), (4, 2, 8, 32, 5), (5, 1, 16, 4, 40)):
        for mix, requests in MIXES.items():
            of = spec(heads, kv_heads, 16, dtype=dtype, page_size=page_size, chosen=count, chosen_block=block)
            q, kv, context, *_ = paged_attention_arguments(of, requests, None)
            for groups in {1, kv_heads}:
                choice = BlockChoiceSpec("choose_blocks", 16, block, count, dtype, page_size, 1)
                keys = kv[:, :1, :1].contiguous()
                chosen = Op.registry["choose_blocks"].reference(q[:, :groups], keys, context, choice)
                what = f"{count} blocks of {block}, {heads} heads, {groups} of {kv_heads} choices, {mix}"
                yield what, (q, kv, chosen, context, of)


ATTENTION_OPS: dict[str, Cases] = {
    "attention": attention,
    "biased_attention": biased_attention,
    "choose_pools": choose_pools,
    "block_sparse_attention": block_sparse_attention,
    "choose_blocks": choose_blocks,
    "choose_mean_blocks": choose_mean_blocks,
    "choose_tokens": choose_tokens,
    "chosen_attention": chosen_attention,
    "disentangled_attention": disentangled_attention,
    "paged_attention": paged_attention,
    "paged_distance_attention": paged_distance_attention,
    "rotary_write_kv": rotary_write_kv,
    "write_kv": write_kv,
}
