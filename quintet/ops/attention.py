"""Specifications of paged attention, and the attention that is made of nothing but these ops."""

import torch
from torch import Tensor

from quintet.ops.registry import Op, Ops
from quintet.platforms.interface import Attention
from quintet.types import AttentionSpec, Batch, HostBatch, KVLayout


@Op
def write_kv(kv: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """kv [P, 2, Hkv, page_size, D] with k and v [T, Hkv, D] at batch.slots [T]. May write in place; use its result.

    The tokens of a page stand side by side for each head, so that a head's keys are one matrix.
    """
    page_size = kv.shape[3]
    pages = torch.div(batch.slots, page_size, rounding_mode="floor")
    kv[pages, :, :, batch.slots - pages * page_size] = torch.stack([k, v], dim=1).to(kv.dtype)
    return kv


@Op
def paged_attention(q: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """q [T, H, D] over the pages of each token's request in kv [P, 2, Hkv, page_size, D] -> [T, H, D], in float32.

    Causal by position; the window, soft-cap and sinks are the spec's. Every token gathers its request's whole
    page table: short to read and to trace, and far too large for a long prompt.
    """
    tokens, heads, dim = q.shape
    rows = torch.index_select(batch.page_table, 0, batch.owners)  # [T, N]
    cache = kv[rows].permute(0, 1, 4, 2, 3, 5).reshape(tokens, -1, 2, spec.kv_heads, dim).float()  # [T, S, 2, Hkv, D]
    k, v = cache.unbind(2)
    grouped = q.float().reshape(tokens, spec.kv_heads, heads // spec.kv_heads, dim)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    slots = torch.arange(k.shape[1], device=q.device)[None, :]
    seen = slots <= batch.positions[:, None]
    if spec.window is not None:
        seen = seen & (slots > batch.positions[:, None] - spec.window)
    scores = torch.where(seen[:, None, None, :], scores, -1e30)
    v = torch.where(seen[:, :, None, None], v, 0.0)  # a page may hold anything past its request's end, NaN too
    if sinks is not None:
        column = sinks.float().reshape(1, spec.kv_heads, -1, 1).expand(tokens, -1, -1, -1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("tkgs,tskd->tkgd", weights, v).reshape(tokens, heads, dim).to(q.dtype)


class PagedAttention(Attention):
    """write_kv, then paged_attention, on pages of [2, Hkv, page_size, D]; nothing to plan."""

    def __init__(self, spec: AttentionSpec, ops: Ops) -> None:
        shape = (2, spec.kv_heads, spec.page_size, spec.head_dim)
        self.layout = KVLayout(spec.dtype, spec.page_size, shape)
        self._spec, self._write, self._attend = spec, ops.write_kv, ops.paged_attention

    def plan(self, batch: HostBatch) -> HostBatch:
        return batch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        kv = self._write(kv, k, v, batch)
        return self._attend(q, kv, batch, self._spec, sinks), kv
