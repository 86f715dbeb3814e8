"""Attention by torch alone, one request after the other: the last resort over pages, and a step's own K and V.

It asks the host how long requests are, so steps with it are not captured.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.types import AttentionSpec, Batch, StepContext
from quintet.ops.attention import attention, from_cache_rows, paged_attention

ROWS = 512  # tokens of a request at a time: scores are rows x context in float32


@dataclass(frozen=True)
class Context:
    """Keys and values that tokens of one request may see."""

    k: Tensor  # [Hkv, S, D], in the type of queries
    v: Tensor  # [Hkv, S, value_dim]
    places: Tensor  # [S]: positions of the keys


@paged_attention.provide("gathered")
def _paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    batch, group = context
    out = q.new_zeros((*q.shape[:2], spec.value_dim))  # of padded tokens
    starts, lengths = batch.query_start_loc.tolist(), group.seq_lens.tolist()
    for row, length in enumerate(lengths):
        own = slice(starts[row], starts[row + 1])
        if own.start < own.stop:
            first = length - (own.stop - own.start)
            seen = _context(kv, group.block_table[row], (_behind(first, spec), length), spec)
            _attend_rows(out, q, batch.positions, own, seen, (spec, sinks))
    return out


@attention.provide("gathered")
def _attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    out = torch.zeros_like(q)  # of padded tokens
    starts = batch.query_start_loc.tolist()
    for own in map(slice, starts[:-1], starts[1:]):
        if own.start < own.stop:
            context = Context(k[own].transpose(0, 1), v[own].transpose(0, 1), batch.positions[own])
            _attend_rows(out, q, batch.positions, own, context, (spec, sinks))
    return out


def _behind(first: int, spec: AttentionSpec) -> int:
    """Returns how many positions lie in pages that no token from `first` on sees: the table may hold page 0 there."""
    if spec.chunk is not None:
        return first // spec.chunk * spec.chunk // spec.page_size * spec.page_size
    if spec.window is None:
        return 0
    return max(0, first - spec.window + 1) // spec.page_size * spec.page_size


def _context(kv: Tensor, pages: Tensor, stretch: tuple[int, int], spec: AttentionSpec) -> Context:
    """This stretch of one request's positions."""
    size, (first, end) = spec.page_size, stretch
    own = pages[first // size : -(-end // size)].long()
    rows = kv.view(torch.uint8)[own].view(kv.dtype)  # some types have no indexing of their own
    rows = rows.permute(1, 2, 0, 3, 4).reshape(kv.shape[1], spec.kv_heads, -1, kv.shape[4])[:, :, : end - first]
    wide = from_cache_rows(rows, spec.head_dim).to(spec.dtype)
    return Context(wide[0], wide[-1, ..., : spec.value_dim], torch.arange(first, end, device=kv.device))


def _attend_rows(
    out: Tensor, q: Tensor, positions: Tensor, own: slice, context: Context, layer: tuple[AttentionSpec, Tensor | None]
) -> None:
    """Writes the results of a request's own tokens."""
    for start in range(own.start, own.stop, ROWS):
        rows = slice(start, min(start + ROWS, own.stop))
        out[rows] = _attend(q[rows], positions[rows], context, layer)


def _attend(q: Tensor, positions: Tensor, context: Context, layer: tuple[AttentionSpec, Tensor | None]) -> Tensor:
    """q [Q, H, D] -> [Q, H, value_dim]; torch's fused attention where it has all that the layer wants."""
    spec, sinks = layer
    group = spec.heads // spec.kv_heads
    apart = context.places[None, :] - positions[:, None]  # [Q, S]
    seen = apart <= 0 if spec.causal else torch.ones_like(apart, dtype=torch.bool)
    if spec.window is not None:
        seen = seen & (apart > -spec.window) & (apart < spec.window)
    if spec.chunk is not None:
        seen = seen & (apart >= -(positions % spec.chunk)[:, None])
    queries, keys, values = q.transpose(0, 1), *(x.repeat_interleave(group, 0) for x in (context.k, context.v))
    bias = torch.zeros_like(apart, dtype=torch.float32).masked_fill(~seen, float("-inf"))[None]  # [1 or H, Q, S]
    if spec.alibi is not None:
        bias = bias - torch.tensor(spec.alibi, device=q.device)[:, None, None] * apart.abs()
    if spec.softcap is None and sinks is None:
        mask = bias.to(q.dtype).expand(spec.heads, -1, -1)[None]
        out = functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, scale=spec.scale
        )
        return out[0].transpose(0, 1)
    scores = (queries.float() @ keys.float().transpose(1, 2)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.float()).transpose(0, 1).to(q.dtype)
