"""Attention over pages [Hkv, page_size, 2 D]: the heads outside, a token's key beside its value."""

from dataclasses import dataclass

import numpy as np
import torch
from quintet.contract import AttentionSpec, HostBatch, HostGroup, IntArray, Layout, Mixer, State, StepContext
from torch import Tensor

from acme.chip import FP8
from acme.launch import launch

ROWS = 4  # a request's tokens that attend together; a multiple of 4, see kernels.TILE
SPAN = 64  # tokens of context that they look at together
NOTHING = -1e30  # a maximum over no scores; finite, so that differences with it are not NaN


class AcmeAttention(Mixer):
    """Writes K and V, and attends, in one kernel. plan() cuts the step into pieces of ROWS tokens of one request."""

    def __init__(self, spec: AttentionSpec) -> None:
        reasons = refusals(spec)
        if reasons:
            raise ValueError(f"attention on acme: {'; '.join(reasons)}")
        self._spec = spec
        shape = spec.kv_heads, spec.page_size, 2 * spec.head_dim
        self.layouts = (Layout(spec.cache_dtype, shape, window=spec.window),)

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        return (pieces_of(batch),)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        state: State,
        step_context: StepContext,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        return launch(attend, attend_shape, q, k, v, state[0], step_context, sinks, self._spec), state


def pieces_of(batch: HostBatch) -> IntArray:
    """The pieces of the step: rows of (request, first token, count), so many as the variant can have."""
    tokens, requests = len(batch.token_ids), len(batch.query_start_loc) - 1
    pieces = np.zeros((min(tokens, requests + tokens // ROWS), 3), np.int32)
    counts = np.diff(batch.query_start_loc)
    each = -(-counts // ROWS)
    rows = np.repeat(np.arange(requests), each)
    within = ROWS * (np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each))
    pieces[: len(rows)] = np.stack(
        [rows, batch.query_start_loc[rows] + within, np.minimum(ROWS, counts[rows] - within)], 1
    )
    return pieces


def refusals(spec: AttentionSpec) -> list[str]:
    """All reasons why there is no such attention here."""
    reasons = []
    if spec.cache_dtype not in (spec.dtype, FP8):
        reasons.append(
            f"a KV cache in {spec.cache_dtype} is not read by its kernels; set kv_cache_dtype to auto, or fp8 for {FP8}"
        )
    if spec.shared or not spec.causal:
        reasons.append("its kernel reads keys with values of their own, of the tokens before; run this model elsewhere")
    if spec.alibi is not None:
        reasons.append("its kernel adds no slopes (ALiBi) to scores; run this model on another platform")
    return reasons


def attend_shape(q: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def attend(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, step_context: StepContext, sinks: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """The kernel -> [T, H, D]; a token that is padding gets 0."""
    write(kv, k, v, step_context.group.slot_mapping, spec)
    (planned,) = step_context.group.plan
    pieces = planned[planned[:, 2] > 0].long()
    out = torch.zeros(q.shape, dtype=q.dtype)
    if len(pieces):
        work = Work.of(pieces, step_context)
        found = attended(grouped(q[work.tokens].float() * spec.scale, spec), work, kv, sinks, spec)
        out[work.tokens[work.own]] = found[work.own].to(q.dtype)
    return out


@dataclass(frozen=True)
class Work:
    """N pieces of the step."""

    tokens: Tensor  # [N, ROWS]; the last is repeated to fill a piece
    own: Tensor  # [N, ROWS], whether it is none of these
    positions: Tensor  # [N, ROWS]
    lengths: Tensor  # [N], of their requests
    table: Tensor  # [N, pages]

    @classmethod
    def of(cls, pieces: Tensor, step_context: StepContext) -> "Work":
        rows, firsts, counts = pieces.unbind(1)
        places = torch.arange(ROWS)
        tokens = firsts[:, None] + torch.minimum(places, counts[:, None] - 1)
        own = places < counts[:, None]
        group = step_context.group
        return cls(
            tokens, own, step_context.batch.positions[tokens], group.seq_lens[rows], group.block_table[rows].long()
        )


def write(kv: Tensor, k: Tensor, v: Tensor, slots: Tensor, spec: AttentionSpec) -> None:
    """k and v [T, Hkv, D] to their slots."""
    pages, places = slots.long() // spec.page_size, slots.long() % spec.page_size
    _movable(kv)[pages, :, places] = _movable(encoded(torch.cat([k, v], -1), kv.dtype))


def encoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of the cache's type; in fp8, which has no infinity, at most its largest."""
    if dtype == FP8:
        most = torch.finfo(FP8).max
        x = x.float().clamp(-most, most)
    return x.to(dtype)


def decoded(rows: Tensor) -> Tensor:
    return rows.float()


def _movable(x: Tensor) -> Tensor:
    """fp8 as bytes: torch moves no fp8 by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def grouped(q: Tensor, spec: AttentionSpec) -> Tensor:
    """[N, ROWS, H, D] -> [N Hkv, ROWS G, D]: G query heads share a KV head, and stand side by side."""
    split = q.reshape(len(q), ROWS, spec.kv_heads, -1, spec.head_dim).permute(0, 2, 1, 3, 4)
    return split.reshape(len(q) * spec.kv_heads, -1, spec.head_dim)


def ungrouped(out: Tensor, spec: AttentionSpec) -> Tensor:
    """The other way round."""
    split = out.reshape(-1, spec.kv_heads, ROWS, spec.heads // spec.kv_heads, spec.head_dim)
    return split.permute(0, 2, 1, 3, 4).reshape(-1, ROWS, spec.heads, spec.head_dim)


def attended(rows: Tensor, work: Work, kv: Tensor, sinks: Tensor | None, spec: AttentionSpec) -> Tensor:
    """-> [N, ROWS, H, D] in float32: SPANs of context with a running maximum (Dao et al. 2022)."""
    group = spec.heads // spec.kv_heads
    positions = work.positions.repeat_interleave(group, 1).repeat_interleave(spec.kv_heads, 0)[..., None]
    best, total = started(sinks, len(work.own), spec)
    acc = torch.zeros_like(rows)
    for first in range(_first(work, spec), int(work.positions.max()) + 1, SPAN):
        slots = torch.arange(first, first + SPAN)
        k, v = context(kv, work, slots, spec)
        scores = capped(rows @ k.transpose(1, 2), spec.softcap)
        scores = scores.masked_fill(~seen(slots, positions, spec.window), float("-inf"))
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - higher), torch.exp(best - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc, best = acc * shrink + weights @ v, higher
    return ungrouped(acc / total, spec)


def started(sinks: Tensor | None, pieces: int, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The running maximum and sum [N Hkv, ROWS G, 1]: of nothing, or of each head's sink."""
    if sinks is None:
        shape = pieces * spec.kv_heads, ROWS * spec.heads // spec.kv_heads, 1
        return torch.full(shape, NOTHING), torch.zeros(shape)
    each = sinks.float().reshape(1, spec.kv_heads, 1, -1).expand(pieces, -1, ROWS, -1)
    best = each.reshape(pieces * spec.kv_heads, -1, 1)
    return best, torch.ones_like(best)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def seen(slots: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Whether a row at positions [..., 1] may look at the slots."""
    causal = slots <= positions
    return causal if window is None else causal & (slots > positions - window)


def _first(work: Work, spec: AttentionSpec) -> int:
    """Where the first SPAN starts that some row sees."""
    reach = 0 if spec.window is None else max(0, int(work.positions.min()) - spec.window + 1)
    return reach // SPAN * SPAN


def context(kv: Tensor, work: Work, slots: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """K and V [N Hkv, SPAN, D] of each piece's request. What is past its end or before its window is another's old data
    or page 0: zeros, it may be NaN."""
    pages = work.table[:, (slots // spec.page_size).clamp(max=work.table.shape[1] - 1)]  # [N, SPAN]
    rows = _movable(kv)[pages, :, slots % spec.page_size].view(kv.dtype)  # [N, SPAN, Hkv, 2 D]
    foreign = slots >= work.lengths[:, None]
    if spec.window is not None:
        foreign = foreign | (slots <= work.positions[:, :1] - spec.window)
    wide = decoded(rows).masked_fill(foreign[..., None, None], 0.0)
    k, v = wide.transpose(1, 2).reshape(-1, SPAN, 2 * spec.head_dim).chunk(2, -1)
    return k.contiguous(), v.contiguous()
