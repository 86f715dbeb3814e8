"""Paged attention by torch alone, the last resort: each request's pages are gathered, and read by torch's attention.

It asks the host how long requests are, so steps with it are not captured.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.attention import paged_attention, widened
from quintet.types import AttentionSpec, Batch

ROWS = 512  # tokens of a request at a time: scores are rows x context in float32


@paged_attention.provide("gathered")
def _paged_attention(q: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    out = torch.zeros_like(q)  # padded tokens are nobody's
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for row, length in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        if last == first:
            continue
        k, v = _context(kv, batch.page_table[row], length, spec)
        for start in range(first, last, ROWS):
            own = slice(start, min(start + ROWS, last))
            out[own] = _attend(q[own], k, v, batch.positions[own], (spec, sinks))
    return out


def _context(kv: Tensor, pages: Tensor, length: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """K and V of one request, each [Hkv, S, D] in the type of queries."""
    count = -(-length // spec.page_size)
    rows = kv.view(torch.uint8)[pages[:count].long()].view(kv.dtype)  # some types have no indexing of their own
    rows = rows.permute(1, 2, 0, 3, 4).reshape(2, spec.kv_heads, -1, kv.shape[4])[:, :, :length]
    k, v = widened(rows, spec.head_dim).to(spec.dtype)
    return k, v


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, layer: tuple[AttentionSpec, Tensor | None]) -> Tensor:
    """q [Q, H, D] -> [Q, H, D]; torch's fused attention where it has all that the layer wants."""
    spec, sinks = layer
    group = spec.heads // spec.kv_heads
    places = torch.arange(k.shape[1], device=q.device)
    apart = places[None, :] - positions[:, None]  # [Q, S]
    seen = apart <= 0
    if spec.window is not None:
        seen = seen & (apart > -spec.window)
    queries, keys, values = q.transpose(0, 1), k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    bias = torch.zeros_like(apart, dtype=torch.float32).masked_fill(~seen, float("-inf"))[None]  # [1 or H, Q, S]
    if spec.alibi is not None:
        bias = bias + torch.tensor(spec.alibi, device=q.device)[:, None, None] * apart
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
