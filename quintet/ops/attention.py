"""Specifications of attention, over pages and without, and the mixer that is made of nothing but these ops."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import INT4, AttentionSpec, Batch, Layout, RotaryArgs, StepContext
from quintet.ops.pages import from_int4_rows, int4_row_bytes, to_int4_rows
from quintet.ops.registry import Op, Ops
from quintet.ops.rotary import apply_rotary

SCALE_BYTES = 4  # a float32 behind the numbers of an int8 row
CACHE_DTYPES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # what every provider of ours stores besides the type of the layer


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that one head of one token takes in a cache of this type."""
    if dtype == INT4:
        return int4_row_bytes(head_dim)
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def page_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """Returns the shape of one page: the tokens of a head stand side by side, so that its keys are one matrix.

    Where V is part of K, there are keys alone.
    """
    return 1 if spec.shared else 2, spec.kv_heads, spec.page_size, row_width(spec.head_dim, spec.cache_dtype)


def to_cache_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] as rows of a cache.

    INT4: as to_int4_rows(). int8: the nearest multiples of the row's largest magnitude / 127, and behind them the bytes
    of that scale, which is not finite where the row is not. fp8: the nearest number, the format's largest at most, and
    no scale.
    """
    if dtype == INT4:
        return to_int4_rows(x)
    if dtype == torch.int8:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True) / 127
        steps = torch.where(scale.isfinite(), x, 0.0) / torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
        return torch.cat([steps.round().clamp(-127, 127).to(torch.int8), scale.view(torch.int8)], -1)
    if dtype.is_floating_point and dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return x.float().clamp(-most, most).to(dtype)
    return x.to(dtype)


def from_cache_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Undoes to_cache_rows(): rows -> [..., D] in float32."""
    if rows.dtype == INT4:
        return from_int4_rows(rows, head_dim)
    if rows.dtype != torch.int8:
        return rows.float()
    return rows[..., :head_dim].float() * rows[..., head_dim:].contiguous().view(torch.float32)


@Op
def write_kv(kv: Tensor, k: Tensor, v: Tensor | None, context: StepContext) -> Tensor:
    """kv [P, 2, Hkv, page_size, row_width] with k and v [T, Hkv, D] at the group's slots [T], as to_cache_rows() has
    it; kv is [P, 1, ...] without v.

    May write in place; use its result.
    """
    page_size, slots = kv.shape[3], context.group.slot_mapping
    pages = torch.div(slots, page_size, rounding_mode="floor")
    rows = k[:, None] if v is None else torch.stack([k, v], dim=1)
    kv[pages, :, :, slots - pages * page_size] = to_cache_rows(rows, kv.dtype)
    return kv


@Op
def rotary_write_kv(
    q: Tensor, k: Tensor, v: Tensor, rotary: RotaryArgs, kv: Tensor, context: StepContext
) -> tuple[Tensor, Tensor]:
    """(q turned, kv with k turned and v written): rotary() and write_kv(), for providers that do both at once."""
    q, k = apply_rotary(q, k, rotary, context.batch.positions)
    return q, write_kv.reference(kv, k, v, context)


@Op
def paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """q [T, H, D] over the pages of each token's request in kv [P, 2 or 1, Hkv, page_size, row_width] -> [T, H,
    value_dim], in float32. With spec.shared, V is the beginning of K (DeepSeek-V2 2024, absorbed).

    Causal by position unless the spec says otherwise: then a token sees its request's `lengths`. The window or chunk,
    soft-cap, slopes (Press et al. 2022, after the soft-cap) and sinks are the spec's. Every token gathers its request's
    whole table: short to read and to trace, and far too large for a long prompt.
    """
    batch, group = context
    k, v = paged_rows(q, kv, context, spec)
    places = torch.arange(k.shape[1], device=q.device)[None, :]
    if spec.causal:
        seen = places <= batch.positions[:, None]
    else:
        seen = places < torch.index_select(group.seq_lens, 0, batch.token_to_seq)[:, None]
    if spec.chunk is not None:
        seen = seen & (places >= batch.positions[:, None] - batch.positions[:, None] % spec.chunk)
    return masked_attention(q, k, v, (places - batch.positions[:, None], seen), (spec, sinks))


def paged_rows(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Returns K and V of each token's request: [T, S, Hkv, D] and [T, S, Hkv, value_dim] in float32."""
    rows = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq)  # [T, N]
    cache = kv[rows].permute(0, 1, 4, 2, 3, 5).reshape(q.shape[0], -1, kv.shape[1], spec.kv_heads, kv.shape[4])
    wide = from_cache_rows(cache, q.shape[2]).unbind(2)
    return wide[0], wide[-1][..., : spec.value_dim]


@Op
def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """q [T, H, D] over k and v [T, Hkv, D] of each token's own request in this step -> [T, H, D]: nothing is kept.

    As paged_attention in all else. A request's tokens must all be in the step.
    """
    apart = batch.positions[None, :] - batch.positions[:, None]
    seen = batch.token_to_seq[None, :] == batch.token_to_seq[:, None]
    seen = seen & (
        torch.arange(q.shape[0], device=q.device) < batch.query_start_loc[-1]
    )  # padding belongs to the last row
    if spec.causal:
        seen = seen & (apart <= 0)
    if spec.chunk is not None:
        seen = seen & (apart >= -(batch.positions[:, None] % spec.chunk))
    many = (q.shape[0], *k.shape)
    return masked_attention(q, k.float().expand(many), v.float().expand(many), (apart, seen), (spec, sinks))


@Op
def biased_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec, bias: Tensor) -> Tensor:
    """As `attention`, and a number for each head and distance is added to a score, after the soft-cap.

    bias [H, 2 * reach + 1], float32: column reach + i is of keys i positions behind the query's, or before it where i
    is below 0; keys that are further away have the first or the last number. The layer has neither sinks nor slopes.
    Source: relative positions of T5 (Raffel et al. 2020).
    """
    tokens, reach = q.shape[0], bias.shape[1] // 2
    apart = batch.positions[None, :] - batch.positions[:, None]
    seen = batch.token_to_seq[None, :] == batch.token_to_seq[:, None]
    seen = seen & (torch.arange(tokens, device=q.device) < batch.query_start_loc[-1])
    if spec.causal:
        seen = seen & (apart <= 0)
    places = apart.clamp(-reach, reach) + reach
    added = torch.index_select(bias, 1, places.reshape(-1)).reshape(-1, tokens, tokens).transpose(0, 1)  # [T, H, T]
    many = (tokens, *k.shape)
    return masked_attention(q, k.float().expand(many), v.float().expand(many), (apart, seen), (spec, None), added)


@Op
def choose_tokens(q: Tensor, weights: Tensor, keys: Tensor, context: StepContext, count: int) -> Tensor:
    """Returns the places [T, C] int32 in its request, up to its own, of the tokens that score highest for each token.

    q [T, H, D] and weights [T, H] float32; keys [P, 1, 1, page_size, D], pages of one key for each token. A score is
    the sum over heads of weight * max(0, q . k), in float32; of equal ones the earlier place counts as higher. C is the
    smaller of `count` and the places of the table. Places ascend, -1 stands behind them. They are the top-k of an
    indexer in sparse attention (vLLM's topk_indices). Source: DeepSeek-V3.2 (2025).
    """
    batch, group = context
    rows = torch.index_select(group.block_table, 0, batch.token_to_seq)  # [T, N]
    k = keys[rows, 0, 0].flatten(1, 2).float()  # [T, S, D]
    scores = (torch.einsum("thd,tsd->ths", q.float(), k).clamp(min=0) * weights[:, :, None]).sum(1)
    places = torch.arange(k.shape[1], device=q.device)
    scores = torch.where(places <= batch.positions[:, None], scores, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : min(count, k.shape[1])]
    best = torch.where(best <= batch.positions[:, None], best, k.shape[1]).sort(-1).values
    return torch.where(best < k.shape[1], best, -1).to(torch.int32)


@Op
def choose_pools(q: Tensor, weights: Tensor, keys: Tensor, offsets: Tensor, context: StepContext, count: int) -> Tensor:
    """Returns the places [T, C] int32 as choose_tokens() does, of tokens in whole pools: those of the pools that score
    highest, `count` in all, and the tokens behind the last whole pool, up to the token's own.

    A pool is `pool` tokens in a row from a multiple of it on, offsets [pool, D] float32. keys [P, 1, 1, page_size,
    2 D]: a key of each token, beside D logits. A pool's key is the sum of those of its tokens, each feature weighed by
    a softmax over the tokens of logit + offset, in float32. It scores for tokens that see all of it, as a key does in
    choose_tokens(). C is the smaller of count + pool - 1 and the places of the table. Source: GLM-5-Next (Z.ai 2026).
    """
    batch, group = context
    pool, width = offsets.shape
    rows = torch.index_select(group.block_table, 0, batch.token_to_seq)  # [T, N]
    tokens = keys[rows, 0, 0].flatten(1, 2).float()  # [T, S, 2 D]
    length, whole = tokens.shape[1], tokens.shape[1] // pool
    each = tokens[:, : whole * pool].reshape(len(q), whole, pool, 2 * width)
    pooled = (each[..., :width] * (each[..., width:] + offsets).softmax(2)).sum(2)  # [T, S / pool, D]
    scores = (torch.einsum("thd,tsd->ths", q.float(), pooled).clamp(min=0) * weights[:, :, None]).sum(1)
    ends = torch.arange(1, whole + 1, device=q.device) * pool
    seen = ends <= batch.positions[:, None] + 1
    scores = torch.where(seen, scores, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : count // pool]
    first = torch.where(seen.gather(1, best), best * pool, length)  # of a pool's places; past the end: none
    within = torch.arange(pool, device=q.device)
    places = torch.where(first[:, :, None] < length, first[:, :, None] + within, length).flatten(1)
    tail = (batch.positions[:, None] + 1) // pool * pool + within[:-1]
    tail = torch.where(tail <= batch.positions[:, None], tail, length)
    places = torch.cat([places, tail], 1).sort(-1).values[:, : min(count + pool - 1, length)]
    return torch.where(places < length, places, -1).to(torch.int32)


@Op
def chosen_attention(
    q: Tensor, kv: Tensor, chosen: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """q [T, H, D] over the places `chosen` [T, C] of each token's request alone, those from 0 -> [T, H, value_dim]:
    sparse attention, of what choose_tokens has chosen.

    kv [P, 1, 1, page_size, row_width] as paged_attention has it where V is part of K; sinks [H], if the spec has them.
    """
    seen, places = chosen >= 0, chosen.clamp(min=0).long()
    tables = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq).long()
    pages = torch.gather(tables, 1, torch.div(places, spec.page_size, rounding_mode="floor"))
    k = from_cache_rows(kv[pages, 0, 0, places % spec.page_size], q.shape[2])[:, :, None]  # [T, C, 1, D]
    return masked_attention(
        q, k, k[..., : spec.value_dim], (places - context.batch.positions[:, None], seen), (spec, sinks)
    )


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor], layer: tuple[AttentionSpec, Tensor | None],
    added: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, D], k and v [T, S, Hkv, D]; places: distances of keys from tokens [T, S], and which of them are seen.
    `added` [T, H, S]: to scores."""
    (apart, seen), (spec, sinks) = places, layer
    tokens, heads, dim = q.shape
    grouped = q.float().reshape(tokens, spec.kv_heads, heads // spec.kv_heads, dim)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi is not None:
        slopes = torch.tensor(spec.alibi, device=q.device).reshape(spec.kv_heads, -1, 1)
        scores = scores - slopes * apart.abs()[:, None, None, :]
    if added is not None:
        scores = scores + added.reshape(scores.shape)
    if spec.window is not None:
        seen = seen & (apart > -spec.window) & (apart < spec.window)
    scores = torch.where(seen[:, None, None, :], scores, -1e30)
    v = torch.where(seen[:, :, None, None], v, 0.0)  # what is not seen may be anything, NaN too
    if sinks is not None:
        column = sinks.float().reshape(1, spec.kv_heads, -1, 1).expand(tokens, -1, -1, -1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("tkgs,tskd->tkgd", weights, v).reshape(tokens, heads, -1).to(q.dtype)


AHEAD_ROWS = 16  # tokens at a time of those that see some after them: K and V are spread out for each


def _attend_ahead(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """paged_attention of a step in which some tokens see those after them, up to Inputs.until; request by request."""
    batch, group = context
    out, until = q.new_zeros((*q.shape[:2], spec.value_dim)), batch.inputs.until
    assert until is not None and spec.chunk is None, "the engine brings it to layers without chunks alone"
    starts, lengths, size = batch.query_start_loc.tolist(), group.seq_lens.tolist(), spec.page_size
    for row, (start, stop, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        for low in range(start, stop, AHEAD_ROWS):
            own = slice(low, min(low + AHEAD_ROWS, stop))
            first = length - (stop - low)  # position of the first of these tokens
            before = 0 if spec.window is None else max(0, first - spec.window + 1) // size  # pages that none sees
            pages = group.block_table[row][before : -(-length // size)].long()
            cache = (
                kv.view(torch.uint8)[pages]
                .view(kv.dtype)
                .permute(0, 3, 1, 2, 4)
                .reshape(1, -1, kv.shape[1], spec.kv_heads, kv.shape[4])
            )
            wide = from_cache_rows(cache[:, : length - before * size], q.shape[2]).unbind(2)  # [1, S, Hkv, D] each
            places = torch.arange(before * size, length, device=q.device)[None, :]
            last = torch.maximum(batch.positions[own], until[own])[:, None]
            apart = places - batch.positions[own][:, None]
            many = (own.stop - own.start, -1, -1, -1)
            k, v = wide[0].expand(many), wide[-1][..., : spec.value_dim].expand(many)
            out[own] = masked_attention(q[own], k, v, (apart, places <= last), (spec, sinks))
    return out


class PagedAttention(Mixer):
    """write_kv, then paged_attention, on pages of [2, Hkv, page_size, row_width]; nothing to plan.

    `also`: types of a cache that the bound ops store beside CACHE_DTYPES. `attend` serves in the place of
    paged_attention."""

    def __init__(
        self,
        spec: AttentionSpec,
        ops: Ops,
        also: Sequence[torch.dtype] = (),
        attend: Callable[..., Tensor] | None = None,
    ) -> None:
        known = *CACHE_DTYPES, *also
        if spec.cache_dtype not in (spec.dtype, *known):
            raise ValueError(
                f"a cache is of the layer's type, or {' or '.join(map(str, known))}; not {spec.cache_name}"
            )
        self.layouts = (layout(spec),)
        self._spec, self._write, self._attend = spec, ops.write_kv, attend or ops.paged_attention
        self.fuses_rotary = not spec.shared and ops.served("rotary_write_kv")
        if self.fuses_rotary:
            self._turn_and_write = ops.rotary_write_kv

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        kv = self._write(state[0], k, v, context)
        return self._attended(q, kv, context, sinks), (kv,)

    def _attended(self, q: Tensor, kv: Tensor, context: StepContext, sinks: Tensor | None) -> Tensor:
        ahead = self._spec.ahead and context.batch.inputs.until is not None
        attend = _attend_ahead if ahead else self._attend
        return attend(q, kv, context, self._spec, sinks)

    def with_rotary(  # noqa: PLR0913  # __call__'s, and the turn
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: RotaryArgs,
        state: State,
        context: StepContext,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        q, kv = self._turn_and_write(q, k, v, rotary, state[0], context)
        return self._attended(q, kv, context, sinks), (kv,)


class ChosenAttention(PagedAttention):
    """write_kv, then chosen_attention or block_sparse_attention: of a layer that is given what its tokens see."""

    def __init__(self, spec: AttentionSpec, ops: Ops, also: Sequence[torch.dtype] = ()) -> None:
        super().__init__(spec, ops, also)
        self._attend_chosen = ops.block_sparse_attention if spec.chosen_block else ops.chosen_attention

    def attend_chosen(  # noqa: PLR0913  # Mixer's
        self, q: Tensor, k: Tensor, chosen: Tensor, state: State, context: StepContext, v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        kv = self._write(state[0], k, v, context)
        more = () if self._spec.chosen_block else (sinks,)
        return self._attend_chosen(q, kv, chosen, context, self._spec, *more), (kv,)


class CrossAttention(Mixer):
    """paged_attention over an encoder's rows, which keep() has written."""

    def __init__(self, spec: AttentionSpec, ops: Ops, also: Sequence[torch.dtype] = ()) -> None:
        if spec.causal or spec.window or spec.chunk or spec.alibi:
            raise ValueError("each token sees all rows of an encoder: there are no windows, chunks or slopes")
        paged = PagedAttention(spec, ops, also)
        self.layouts = (replace(paged.layouts[0], cross=True),)
        self._spec, self._write, self._attend = spec, ops.write_kv, ops.paged_attention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return self._attend(q, state[0], context, self._spec, sinks), state

    def keep(self, k: Tensor, v: Tensor, state: State, context: StepContext) -> State:
        return (self._write(state[0], k, v, context),)


class PlainAttention(Mixer):
    """The op `attention`: a layer that keeps nothing."""

    def __init__(self, spec: AttentionSpec, ops: Ops) -> None:
        self._spec, self._attend = spec, ops.attention

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        return self._attend(q, k, v, context.batch, self._spec, sinks), state


def layout(spec: AttentionSpec) -> Layout:
    """Returns the layout that PagedAttention keeps for such a layer."""
    return Layout(spec.cache_dtype, page_shape(spec), window=spec.window or spec.chunk, chunked=spec.chunk is not None)


def mixer(spec: AttentionSpec, ops: Ops, also: Sequence[torch.dtype] = ()) -> Mixer:
    """The mixer that is made of the bound ops; `also` as PagedAttention has it."""
    if spec.source == "cross":
        return CrossAttention(spec, ops, also)
    if spec.chosen:
        return ChosenAttention(spec, ops, also)
    return PlainAttention(spec, ops) if spec.source == "none" else PagedAttention(spec, ops, also)
