"""Paged attention in torch on host memory: blocks of context with a running maximum (Dao et al. 2022).

Every product has the same shape whatever the batch holds (rows in fours, context in blocks of SPLIT): MKL adds in
another order otherwise, and a request's results would depend on its neighbours.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, BlockChoiceSpec, RotaryArgs, StepContext
from quintet.ops.attention import choose_pools, choose_tokens, chosen_attention, from_cache_rows, paged_attention
from quintet.ops.distance_attention import paged_distance_attention
from quintet.ops.sparse.blocks import block_sparse_attention, choose_blocks, choose_mean_blocks, mean_keys

SPLIT = 128  # tokens of context per block; page sizes divide it
ROWS = 4
NOTHING = -1e30  # a maximum over no scores; finite, so that differences with it are not NaN


@dataclass(frozen=True)
class Queries:
    """Requests that bring the same number of tokens."""

    q: Tensor  # [R, Q, H, D]
    positions: Tensor  # [R, Q]
    table: Tensor  # [R, N]
    lengths: Tensor  # [R], tokens of context
    span: tuple[int, int]  # the shortest and the longest of them
    numbers: Tensor | None = None  # [R, Q, H, N], of distances


@paged_attention.provide("torch")
def _paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    return _attend(q, kv, context, spec, sinks, None)


@paged_distance_attention.provide("torch")
def _paged_distance_attention(
    q: Tensor, kv: Tensor, numbers: Tensor, context: StepContext, spec: AttentionSpec
) -> Tensor:
    return _attend(q, kv, context, spec, None, numbers)


def _attend(
    q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None, numbers: Tensor | None
) -> Tensor:
    """Requests with one token go together, the others one by one."""
    batch, group = context
    starts = batch.query_start_loc.tolist()
    counts = [last - first for first, last in zip(starts[:-1], starts[1:], strict=True)]
    out = q.new_empty((*q.shape[:2], spec.value_dim))
    single = [r for r, count in enumerate(counts) if count == 1]
    if single:
        rows = [starts[r] for r in single]
        together = _queries(
            q[rows][:, None], batch.positions[rows][:, None], group.block_table[single], group.seq_lens[single],
            None if numbers is None else numbers[rows][:, None],
        )  # fmt: skip
        out[rows] = _attend_blocks(together, kv, spec, sinks)[:, 0]
    for r, count in enumerate(counts):
        if count > 1:
            own, row = slice(starts[r], starts[r + 1]), slice(r, r + 1)
            alone = _queries(
                q[None, own], batch.positions[None, own], group.block_table[row], group.seq_lens[row],
                None if numbers is None else numbers[None, own],
            )  # fmt: skip
            out[own] = _attend_blocks(alone, kv, spec, sinks)[0]
    return out


def _queries(q: Tensor, positions: Tensor, table: Tensor, lengths: Tensor, numbers: Tensor | None) -> Queries:
    return Queries(q, positions, table, lengths, (int(lengths.min()), int(lengths.max())), numbers)


def _attend_blocks(queries: Queries, kv: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """-> [R, Q, H, D] in the type of q."""
    requests, count, heads, _ = queries.q.shape
    group = heads // spec.kv_heads
    rows = _grouped(queries.q.float() * spec.scale, spec.kv_heads)  # [R * Hkv, Q * G padded, D]
    positions = queries.positions.repeat_interleave(group, dim=1)  # [R, Q * G]
    positions = _padded(positions[:, :, None])[:, :, 0].repeat_interleave(spec.kv_heads, dim=0)
    slopes = None if spec.alibi is None else _per_head(torch.tensor(spec.alibi), spec, requests, count)
    numbers = None if queries.numbers is None else _grouped(queries.numbers.float(), spec.kv_heads)
    best, total = _start(rows, spec, sinks, requests, count)
    acc = rows.new_zeros((*rows.shape[:2], spec.value_dim))
    for first in range(_first_block(queries, spec), queries.span[1], SPLIT):
        k, v = _block(kv, queries, first, spec)
        seen = _seen(positions, queries.lengths, first, spec)
        scores = rows @ k
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if slopes is not None:
            scores = scores - slopes * (torch.arange(first, first + SPLIT) - positions[:, :, None]).abs()
        if numbers is not None:
            behind = positions[:, :, None] - torch.arange(first, first + SPLIT)
            found = numbers.gather(2, behind.clamp(0, numbers.shape[2] - 1).long())
            scores = scores + found.masked_fill((behind < 0) | (behind >= numbers.shape[2]), 0.0)
        scores = scores.masked_fill(~seen, float("-inf"))
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - higher), torch.exp(best - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc, best = acc * shrink + weights @ v, higher
    out = (acc / total)[:, : count * group].reshape(requests, spec.kv_heads, count, group, -1)
    return out.permute(0, 2, 1, 3, 4).reshape(requests, count, heads, -1).to(queries.q.dtype)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """[R, Q, H, D] -> [R * Hkv, Q * G, D], rows padded to a multiple of ROWS."""
    requests, count, heads, dim = q.shape
    split = q.reshape(requests, count, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4)
    return _padded(split.reshape(requests * kv_heads, -1, dim))


def _padded(x: Tensor) -> Tensor:
    """Repeats the first row until the number of rows is a multiple of ROWS."""
    missing = -x.shape[1] % ROWS
    return torch.cat([x, x[:, :1].expand(-1, missing, -1)], dim=1) if missing else x


def _start(rows: Tensor, spec: AttentionSpec, sinks: Tensor | None, requests: int, count: int) -> tuple[Tensor, Tensor]:
    """The running maximum and sum, [R * Hkv, rows, 1]: of nothing, or of each head's sink."""
    if sinks is None:
        return rows.new_full((*rows.shape[:2], 1), NOTHING), rows.new_zeros((*rows.shape[:2], 1))
    best = _per_head(sinks.float(), spec, requests, count)
    return best, torch.ones_like(best)


def _per_head(x: Tensor, spec: AttentionSpec, requests: int, count: int) -> Tensor:
    """[H] -> [R * Hkv, rows, 1]."""
    return _grouped(x.reshape(1, 1, -1, 1).expand(requests, count, -1, -1), spec.kv_heads)


def _first_block(queries: Queries, spec: AttentionSpec) -> int:
    """Returns the first slot of the first block that some query sees."""
    return int(_first_seen(queries.positions, spec).min()) // SPLIT * SPLIT


def _first_seen(positions: Tensor, spec: AttentionSpec) -> Tensor:
    """The first position that each of these sees."""
    if spec.chunk is not None:
        return positions - positions % spec.chunk
    return torch.zeros_like(positions) if spec.window is None else (positions - spec.window + 1).clamp(min=0)


def _block(kv: Tensor, queries: Queries, first: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """K [R * Hkv, D, SPLIT] and V [R * Hkv, SPLIT, value_dim] of the context from `first` on, in float32.

    What lies past a request's end is another's old data, and page 0, which stands behind its window, holds what padding
    wrote; a weight of 0 would not keep infinities out: there V is 0.
    """
    pages = queries.table[:, first // spec.page_size : (first + SPLIT) // spec.page_size]
    missing = SPLIT // spec.page_size - pages.shape[1]
    if missing:
        pages = torch.nn.functional.pad(pages, (0, missing))
    cache = from_cache_rows(kv[pages], spec.head_dim).permute(2, 0, 3, 1, 4, 5)
    cache = cache.reshape(kv.shape[1], -1, spec.kv_heads, SPLIT, spec.head_dim)
    forgets = spec.window is not None or spec.chunk is not None
    if first + SPLIT > queries.span[0] or forgets:
        slots = torch.arange(first, first + SPLIT)
        foreign = slots >= queries.lengths[:, None]
        if forgets:
            foreign = foreign | (slots < _first_seen(queries.positions, spec).amin(1, keepdim=True))
        cache = cache.masked_fill(foreign[:, None, :, None], 0)
    kept = cache.reshape(kv.shape[1], -1, SPLIT, spec.head_dim)
    return kept[0].transpose(1, 2), kept[-1][..., : spec.value_dim]


def _seen(positions: Tensor, lengths: Tensor, first: int, spec: AttentionSpec) -> Tensor:
    """[R * Hkv, rows, SPLIT]: whether a row may look at a slot."""
    slots, places = torch.arange(first, first + SPLIT, device=positions.device), positions[:, :, None]
    if spec.causal:
        seen = slots <= places
    else:
        seen = (slots < lengths.repeat_interleave(spec.kv_heads)[:, None, None]).expand(*positions.shape, SPLIT)
    if spec.window is not None:
        seen = seen & (slots > places - spec.window) & (slots < places + spec.window)
    return seen if spec.chunk is None else seen & (slots >= _first_seen(places, spec))


@choose_tokens.provide("torch")
def _choose_tokens(q: Tensor, weights: Tensor, keys: Tensor, context: StepContext, count: int) -> Tensor:
    """Token by token, over the keys up to its own alone: so a product's shape depends on the token's position."""
    size, table = keys.shape[3], context.group.block_table
    count = min(count, table.shape[1] * size)
    out = torch.full((len(q), count), -1, dtype=torch.int32)
    for row, first, positions in rows_of(context):
        k = keys[table[row, : -(-(positions[-1] + 1) // size)], 0, 0].flatten(0, 1).float()  # [S, D]
        for index, position in enumerate(positions, first):
            seen = position + 1
            if seen <= count:
                out[index, :seen] = torch.arange(seen, dtype=torch.int32)
                continue
            out[index] = best_places(k[:seen], q[index], weights[index], count)
    return out


def best_places(k: Tensor, q: Tensor, weights: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` keys of k [S, D] that score highest for q [H, D], ascending."""
    scores = (k @ q.float().t()).clamp_(min=0) @ weights
    scores = scores.nan_to_num_(math.inf, math.inf, -math.inf)  # NaN is the highest, as in the specification
    least = scores.topk(count).values[-1]
    higher, equal = scores > least, scores == least
    equal &= equal.cumsum(0) <= count - higher.sum()
    return (higher | equal).nonzero()[:, 0]


@choose_pools.provide("torch")
def _choose_pools(
    q: Tensor, weights: Tensor, keys: Tensor, offsets: Tensor, context: StepContext, count: int
) -> Tensor:
    """Token by token, over the pools up to its own alone."""
    size, table, (pool, width) = keys.shape[3], context.group.block_table, offsets.shape
    out = torch.full((len(q), min(count + pool - 1, table.shape[1] * size)), -1, dtype=torch.int32)
    within = torch.arange(pool, dtype=torch.int32)
    for row, first, positions in rows_of(context):
        whole = (positions[-1] + 1) // pool
        tokens = keys[table[row, : -(-(whole * pool) // size)], 0, 0].flatten(0, 1)[: whole * pool].float()
        pooled = _pooled(tokens.reshape(whole, pool, 2 * width), offsets)
        for index, position in enumerate(positions, first):
            full = (position + 1) // pool
            best = torch.arange(full)
            if full > count // pool:
                best = best_places(pooled[:full], q[index], weights[index], count // pool)
            places = (best[:, None] * pool + within).flatten().to(torch.int32)
            tail = torch.arange(full * pool, position + 1, dtype=torch.int32)
            out[index, : len(places) + len(tail)] = torch.cat([places, tail])
    return out


def _pooled(tokens: Tensor, offsets: Tensor) -> Tensor:
    """[N, pool, 2 D] -> keys [N, D] of pools; token by token, so that a pool's does not depend on others."""
    each, logits = tokens.chunk(2, dim=-1)
    logits = logits + offsets
    shares = (logits - logits.amax(1, keepdim=True)).exp()
    total, pooled = torch.zeros_like(each[:, 0]), torch.zeros_like(each[:, 0])
    for at in range(tokens.shape[1]):
        total = total + shares[:, at]
        pooled = pooled + shares[:, at] * each[:, at]
    return pooled / total


@chosen_attention.provide("torch")
def _chosen_attention(
    q: Tensor, kv: Tensor, chosen: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Token by token: a token reads the rows that were chosen for it, and no other."""
    out, table, size = q.new_empty((*q.shape[:2], spec.value_dim)), context.group.block_table.long(), spec.page_size
    for row, first, positions in rows_of(context):
        for index, position in enumerate(positions, first):
            places = chosen[index, : position + 1].long()
            places = places[places >= 0]
            k = from_cache_rows(kv[table[row][places // size], 0, 0, places % size], q.shape[2])  # [C, D]
            scores = (q[index].float() * spec.scale) @ k.t()
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None]], -1)
            out[index] = scores.softmax(-1)[:, : len(k)] @ k[:, : spec.value_dim]
    return out


@choose_blocks.provide("torch")
def _choose_blocks(q: Tensor, keys: Tensor, context: StepContext, spec: BlockChoiceSpec) -> Tensor:
    size, table, block = keys.shape[3], context.group.block_table, spec.block
    out = torch.full((*q.shape[:2], min(spec.count, -(-table.shape[1] * size // block))), -1, dtype=torch.int32)
    for row, first, positions in rows_of(context):
        k = keys[table[row, : positions[-1] // size + 1], 0, 0].flatten(0, 1).float()  # [S, D]
        for index, position in enumerate(positions, first):
            num = position // block + 1
            if num <= spec.count:
                out[index, :, :num] = torch.arange(num, dtype=torch.int32)
                continue
            scores = (k[: position + 1] @ q[index].float().t()).t()
            scores = scores.nan_to_num_(math.inf, math.inf, -math.inf)  # NaN is the highest, as in the specification
            scores = torch.nn.functional.pad(scores, (0, num * block - position - 1), value=-math.inf)
            scores = scores.unflatten(1, (num, block)).amax(-1)
            scores[:, max(num - spec.local, 0) :] = math.inf
            out[index] = _highest(scores, spec.count)
    return out


@choose_mean_blocks.provide("torch")
def _choose_mean_blocks(
    q: Tensor, keys: Tensor, turn: RotaryArgs, context: StepContext, spec: BlockChoiceSpec
) -> Tensor:
    size, table, block = keys.shape[3], context.group.block_table, spec.block
    out = torch.full((len(q), 1, 1 + min(spec.count, -(-table.shape[1] * size // block))), -1, dtype=torch.int32)
    for row, first, positions in rows_of(context):
        whole = (positions[-1] + 1) // block  # complete blocks
        k = keys[table[row, : positions[-1] // size + 1], 0, 0].flatten(0, 1)[: whole * block]
        k = mean_keys(k.unflatten(0, (whole, block)), turn, keys.dtype).float()  # [N, D]
        for index, position in enumerate(positions, first):
            num, rest = divmod(position + 1, block)
            if num <= spec.count:
                out[index, 0, : num + (rest > 0)] = torch.arange(num + (rest > 0), dtype=torch.int32)
                continue
            scores = (k[:num] @ q[index].float().t()).clamp_(min=0).sum(1)
            scores = scores.nan_to_num_(math.inf, math.inf, -math.inf)
            out[index, 0, : spec.count] = _highest(scores[None], spec.count)[0]
            if rest:
                out[index, 0, spec.count] = num
    return out


def _highest(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` highest of each row, ascending; of equal ones the earlier counts as higher."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values.to(torch.int32)


@block_sparse_attention.provide("torch")
def _block_sparse_attention(q: Tensor, kv: Tensor, chosen: Tensor, context: StepContext, spec: AttentionSpec) -> Tensor:
    out, table, size = torch.empty_like(q), context.group.block_table.long(), spec.page_size
    within, group = torch.arange(spec.chosen_block), spec.heads // spec.kv_heads
    for row, first, positions in rows_of(context):
        for index, position in enumerate(positions, first):
            for head in range(spec.kv_heads):
                blocks = chosen[index, head % chosen.shape[1]].long()
                places = (blocks[blocks >= 0, None] * spec.chosen_block + within).flatten()
                places = places[places <= position]
                pages, own = table[row][places // size], slice(head * group, (head + 1) * group)
                k, v = (from_cache_rows(kv[pages, side, head, places % size], q.shape[2]) for side in (0, 1))
                scores = (q[index, own].float() * spec.scale) @ k.t()
                out[index, own] = (scores.softmax(-1) @ v).to(q.dtype)
    return out


def rows_of(context: StepContext) -> Iterator[tuple[int, int, list[int]]]:
    """Yields each request's row, its first token in the step, and the positions of its tokens."""
    starts, positions = context.batch.query_start_loc.tolist(), context.batch.positions.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        if first < last:
            yield row, first, positions[first:last]
