"""Specifications of paged attention, and the attention that is made of nothing but these ops."""

import torch
from torch import Tensor

from quintet.ops.registry import Op, Ops
from quintet.platforms.interface import Attention
from quintet.types import AttentionSpec, Batch, HostBatch, KVLayout

SCALE_BYTES = 4  # a float32 behind the numbers of an int8 row
CACHED = (torch.int8, torch.float8_e4m3fn)  # what every provider of ours stores besides the type of the layer


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that one head of one token takes in a cache of this type."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def page_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Of one page: the tokens of a head stand side by side, so that its keys are one matrix."""
    return 2, spec.kv_heads, spec.page_size, row_width(spec.head_dim, spec.cached)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] as rows of a cache.

    int8: the nearest multiples of the row's largest magnitude / 127, and behind them the bytes of that scale, which is
    not finite where the row is not. fp8: the nearest number, the format's largest at most, and no scale.
    """
    if dtype == torch.int8:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True) / 127
        steps = torch.where(scale.isfinite(), x, 0.0) / torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
        return torch.cat([steps.round().clamp(-127, 127).to(torch.int8), scale.view(torch.int8)], -1)
    if dtype.is_floating_point and dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return x.float().clamp(-most, most).to(dtype)
    return x.to(dtype)


def widened(rows: Tensor, head_dim: int) -> Tensor:
    """What stored() made rows of: [..., D] in float32."""
    if rows.dtype != torch.int8:
        return rows.float()
    return rows[..., :head_dim].float() * rows[..., head_dim:].contiguous().view(torch.float32)


@Op
def write_kv(kv: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """kv [P, 2, Hkv, page_size, row_width] with k and v [T, Hkv, D] at batch.slots [T], as stored() has it.

    May write in place; use its result.
    """
    page_size = kv.shape[3]
    pages = torch.div(batch.slots, page_size, rounding_mode="floor")
    kv[pages, :, :, batch.slots - pages * page_size] = stored(torch.stack([k, v], dim=1), kv.dtype)
    return kv


@Op
def paged_attention(q: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """q [T, H, D] over the pages of each token's request in kv [P, 2, Hkv, page_size, row_width] -> [T, H, D], in
    float32.

    Causal by position; the window, soft-cap, slopes (Press et al. 2022, after the soft-cap) and sinks are the spec's.
    Every token gathers its request's whole page table: short to read and to trace, and far too large for a long prompt.
    """
    tokens, heads, dim = q.shape
    rows = torch.index_select(batch.page_table, 0, batch.owners)  # [T, N]
    cache = kv[rows].permute(0, 1, 4, 2, 3, 5).reshape(tokens, -1, 2, spec.kv_heads, kv.shape[4])
    k, v = widened(cache, dim).unbind(2)  # [T, S, Hkv, D]
    grouped = q.float().reshape(tokens, spec.kv_heads, heads // spec.kv_heads, dim)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    slots = torch.arange(k.shape[1], device=q.device)[None, :]
    if spec.alibi is not None:
        slopes = torch.tensor(spec.alibi, device=q.device).reshape(spec.kv_heads, -1, 1)
        scores = scores + slopes * (slots - batch.positions[:, None])[:, None, None, :]
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
    """write_kv, then paged_attention, on pages of [2, Hkv, page_size, row_width]; nothing to plan."""

    def __init__(self, spec: AttentionSpec, ops: Ops) -> None:
        if spec.cached not in (spec.dtype, *CACHED):
            raise ValueError(f"a cache is of the layer's type, or {' or '.join(map(str, CACHED))}; not {spec.cached}")
        self.layout = KVLayout(spec.cached, spec.page_size, page_shape(spec))
        self._spec, self._write, self._attend = spec, ops.write_kv, ops.paged_attention

    def plan(self, batch: HostBatch) -> HostBatch:
        return batch

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, batch: Batch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        kv = self._write(kv, k, v, batch)
        return self._attend(q, kv, batch, self._spec, sinks), kv
