"""Ragged paged attention over a work list in Pallas, with a running softmax (Dao et al. 2022)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quintet.interface.types import AttentionSpec
from quintet.platforms.tpu.kernels.blocks import BLOCK, FROM, KEPT, OWNER, SHIFT, TO, block_tokens
from quintet.platforms.tpu.kernels.plain_attention import (
    NOTHING,
    first_position,
    fold,
    last_position,
    masked_scores,
    mean,
    span_pages,
    zero_padding,
)

PAGED_SPAN = 256  # tokens of context that are looked at together
SPAN_BYTES = 2**21  # of a span in the kernel's memory, which holds two
NARROW = 16  # tokens: a tile of bfloat16
LANES = 128
Ref = Any


def attend_paged(
    q: Array,
    kv: Array,
    table: Array,
    pieces: Array,
    sinks: Array | None,
    spec: AttentionSpec,
    *,
    interpret: bool = False,
) -> Array:
    """The same in Pallas: a grid step per piece. Pages come from HBM, a span ahead of the computation, and the first
    span of a piece while the piece before it is still computed; so nothing is fetched that no token looks at.

    Only the page-table rows of this piece and the next are in SMEM. XLA copies the cache for it, unless D is a multiple
    of 128: it stores narrower pages in another order.
    """
    sizes = _Sizes.of(q, kv, table, spec)
    count = pieces.shape[1]
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % LANES))).reshape(table.shape[0], -1, LANES)

    def of_row(w: Array, pieces: Ref) -> tuple[Any, ...]:
        return pieces[OWNER * count + w], 0, 0

    def of_next(w: Array, pieces: Ref) -> tuple[Any, ...]:
        return of_row(jnp.minimum(w + 1, count - 1), pieces)

    def of_block(w: Array, pieces: Ref) -> tuple[Any, ...]:
        return pieces[BLOCK * count + w], 0, 0, 0

    smem = functools.partial(pl.BlockSpec, memory_space=pltpu.SMEM)
    row = functools.partial(smem, (1, *table.shape[1:]))  # in two dimensions: one would be stored eightfold in HBM
    rows = (1, sizes.kv_heads, sizes.rows)  # pieces of one block follow each other: it stays where it is
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    blocks = _to_blocks(q, sizes)
    out = pl.pallas_call(
        functools.partial(_kernel, spec=spec, sizes=sizes, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct((*blocks.shape[:3], sizes.value_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[row(of_row), row(of_next), smem(), pl.BlockSpec((*rows, sizes.dim), of_block), hbm],
            out_specs=pl.BlockSpec((*rows, sizes.value_dim), of_block),
            scratch_shapes=sizes.scratch(kv),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=sizes.vmem_limit(q, kv)
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )(pieces.reshape(-1), table, table, _sink_row(sinks, q), blocks, kv)
    return zero_padding(_from_blocks(out, sizes)[: q.shape[0]], pieces, sizes.tokens)


@dataclass(frozen=True)
class _Sizes:
    """Kernel sizes, fixed when it is compiled. A block's rows are its tokens, for each query head of a KV head."""

    tokens: int  # per block
    group: int
    kv_heads: int
    dim: int
    value_dim: int
    page_size: int
    pages: int  # per span

    @classmethod
    def of(cls, q: Array, kv: Array, table: Array, spec: AttentionSpec) -> "_Sizes":
        _, parts, kv_heads, page_size, dim = kv.shape
        fitting = SPAN_BYTES // (parts * kv_heads * page_size * _up(dim, LANES) * kv.dtype.itemsize)
        pages = max(1, min(span_pages(PAGED_SPAN, spec, table), fitting))
        tokens = block_tokens(q.shape[0], table.shape[0])
        return cls(tokens, q.shape[1] // kv_heads, kv_heads, dim, spec.value_dim, page_size, pages)

    @property
    def rows(self) -> int:
        return self.tokens * self.group

    @property
    def span(self) -> int:
        return self.pages * self.page_size

    def scratch(self, kv: Array) -> list[Any]:
        """Two spans of pages; the state of the running softmax; who has arrived; which of the two comes next."""
        state = (self.kv_heads, self.rows)
        return [
            pltpu.VMEM((2, self.pages, *kv.shape[1:]), kv.dtype),
            pltpu.VMEM((*state, 1), jnp.float32),
            pltpu.VMEM((*state, 1), jnp.float32),
            pltpu.VMEM((*state, self.value_dim), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
        ]

    def vmem_limit(self, q: Array, kv: Array) -> int:
        """Bytes: q and out twice each, the state, the spans and one head's scores; half as much again to work in."""
        dim, rows = _up(self.dim, LANES), self.kv_heads * _up(self.rows, NARROW)
        held = rows * (4 * dim * q.dtype.itemsize + 4 * (dim + 2 * LANES))
        spans = 4 * self.pages * self.kv_heads * _up(self.page_size, NARROW) * dim * kv.dtype.itemsize
        scores = 4 * 4 * self.rows * _up(self.span, LANES)
        return max(2**24, (held + spans + scores) * 3 // 2)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _to_blocks(q: Array, sizes: _Sizes) -> Array:
    """[T, H, D] -> [blocks, Hkv, rows, D]. Rows are ordered by head, then token: a mask tells a row's token."""
    q = jnp.pad(q, ((0, -q.shape[0] % sizes.tokens), (0, 0), (0, 0)))
    q = q.reshape(-1, sizes.tokens, sizes.kv_heads, sizes.group, sizes.dim).transpose(0, 2, 3, 1, 4)
    return q.reshape(-1, sizes.kv_heads, sizes.rows, sizes.dim)


def _from_blocks(out: Array, sizes: _Sizes) -> Array:
    out = out.reshape(-1, sizes.kv_heads, sizes.group, sizes.tokens, sizes.value_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(-1, sizes.kv_heads * sizes.group, sizes.value_dim)


def _sink_row(sinks: Array | None, q: Array) -> Array:
    return jnp.zeros(q.shape[1], jnp.float32) if sinks is None else sinks.astype(jnp.float32)


class _Reach:
    """Pages and positions that piece w reads; none if it is unused or past the last. Scalars, read from SMEM.

    Divides by lax.div: `//` asks for the sign first, and lowering that asks which TPU is there.
    """

    def __init__(self, pieces: Ref, w: Array, spec: AttentionSpec, sizes: _Sizes) -> None:
        count = pl.num_programs(0)
        at = jnp.minimum(w, count - 1)
        self.begin, self.end, self.shift, kept = (pieces[which * count + at] for which in (FROM, TO, SHIFT, KEPT))
        self.last = last_position(self.shift + self.end, kept, spec)
        self.lowest = first_position(self.shift + self.begin, spec)
        self.page = lax.div(self.lowest, sizes.page_size)  # the first of the request's
        self.pages = lax.div(self.last, sizes.page_size) + 1 - self.page
        used = (w < count) & (self.begin < self.end)
        self.spans = jnp.where(used, lax.div(self.pages + sizes.pages - 1, sizes.pages), 0)


@dataclass(frozen=True)
class _Fetch:
    """Copies of pages from HBM into one of two spans of VMEM."""

    kv: Ref
    spans: Ref  # [2, pages, 2 or 1, Hkv, page_size, D]
    arrived: Ref
    pages: int

    def start(self, reach: _Reach, row: Ref, i: Array, into: Array) -> None:
        """Starts copies of the reach's i-th span, if it has one."""
        pl.when(i < reach.spans)(lambda: self._each(reach, row, i, into, lambda copy: copy.start()))

    def wait(self, reach: _Reach, row: Ref, i: Array, into: Array) -> None:
        self._each(reach, row, i, into, lambda copy: copy.wait())

    def _each(self, reach: _Reach, row: Ref, i: Array, into: Array, act: Callable[[Any], None]) -> None:
        def one(j: Array, _: None) -> None:
            at = reach.page + i * self.pages + j
            page = row[0, lax.div(at, LANES), lax.rem(at, LANES)]
            act(pltpu.make_async_copy(self.kv.at[page], self.spans.at[into, j], self.arrived.at[into]))

        lax.fori_loop(0, jnp.minimum(self.pages, reach.pages - i * self.pages), one, None)


def _kernel(
    pieces: Ref,
    row: Ref,
    next_row: Ref,
    sinks: Ref,
    q: Ref,
    kv: Ref,
    out: Ref,
    spans: Ref,
    best: Ref,
    total: Ref,
    acc: Ref,
    arrived: Ref,
    turn: Ref,
    *,
    spec: AttentionSpec,
    sizes: _Sizes,
    has_sinks: bool,
) -> None:
    w, count = pl.program_id(0), pl.num_programs(0)
    own, following = _Reach(pieces, w, spec, sizes), _Reach(pieces, w + 1, spec, sizes)
    fetch = _Fetch(kv, spans, arrived, sizes.pages)

    @pl.when(w == 0)
    def _first() -> None:
        turn[0] = 0
        fetch.start(own, row, jnp.int32(0), jnp.int32(0))

    @pl.when((w == 0) | (pieces[BLOCK * count + w] != pieces[BLOCK * count + jnp.maximum(w - 1, 0)]))
    def _new_block() -> None:
        out[...] = jnp.zeros_like(out)

    def attend(tokens: int) -> None:
        rows = _Rows(q, out, (best, total, acc), own, sizes, tokens)

        def over(i: Array, at: Array) -> Array:
            pl.when(i + 1 < own.spans)(lambda: fetch.start(own, row, i + 1, 1 - at))
            pl.when(i + 1 == own.spans)(lambda: fetch.start(following, next_row, jnp.int32(0), 1 - at))
            fetch.wait(own, row, i, at)
            start = (own.page + i * sizes.pages) * sizes.page_size
            for head in range(sizes.kv_heads):
                v = spans[at, :, spans.shape[2] - 1, head, :, : sizes.value_dim]
                rows.look(head, spans[at, :, 0, head], v, start, spec)
            return 1 - at

        rows.begin(sinks if has_sinks else None)
        turn[0] = lax.fori_loop(0, own.spans, over, turn[0])
        rows.finish()

    narrow = (own.begin & -NARROW) == ((own.end - 1) & -NARROW)  # decoding, beside a prompt
    if sizes.tokens <= NARROW:
        narrow = jnp.bool_(False)
    pl.when((own.spans > 0) & ~narrow)(lambda: attend(sizes.tokens))
    if sizes.tokens > NARROW:
        pl.when((own.spans > 0) & narrow)(lambda: attend(NARROW))


class _Rows:
    """The rows of a block that a piece computes: all, or those of the NARROW tokens that it is in.

    The state of the rows is packed at the beginning of its memory. Rows that are not the piece's are computed too, from
    anything, and left out at the end.
    """

    def __init__(self, q: Ref, out: Ref, state: tuple[Ref, Ref, Ref], own: _Reach, sizes: _Sizes, tokens: int) -> None:
        self._q, self._out, self._own, self._sizes, self._tokens = q, out, own, sizes, tokens
        self._count = sizes.group * tokens
        self._best, self._total, self._acc = (ref.at[:, pl.ds(0, self._count)] for ref in state)
        whole = tokens == sizes.tokens
        self._offset = 0 if whole else pl.multiple_of(own.begin & -tokens, tokens)

    def _part(self, group: int) -> Any:
        """Rows of the tokens for one query head of a KV head."""
        return pl.ds(group * self._sizes.tokens + self._offset, self._tokens)

    def _token(self, shape: tuple[int, ...]) -> Array:
        """Returns the token of each row, counted in the block."""
        return self._offset + (lax.broadcasted_iota(jnp.int32, shape, 0) & (self._tokens - 1))

    def begin(self, sinks: Ref | None) -> None:
        self._acc[...] = jnp.zeros(self._acc.shape, jnp.float32)
        self._total[...] = jnp.full(self._total.shape, 0 if sinks is None else 1, jnp.float32)
        self._best[...] = jnp.full(self._best.shape, NOTHING, jnp.float32)
        if sinks is None:
            return
        group = lax.broadcasted_iota(jnp.int32, (self._count, 1), 0) >> (self._tokens.bit_length() - 1)
        for head in range(self._sizes.kv_heads):
            column = jnp.full((self._count, 1), NOTHING, jnp.float32)
            for g in range(self._sizes.group):
                column = jnp.where(group == g, sinks[head * self._sizes.group + g], column)
            self._best[head] = column

    def look(self, head: int, k: Array, v: Array, start: Array, spec: AttentionSpec) -> None:
        """At k and v [pages, page_size, D], the context from position `start` on. It may end in unwritten memory."""
        length, own = self._sizes.span, self._own
        k, v = k.reshape(length, self._sizes.dim), v.reshape(length, self._sizes.value_dim)
        precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else lax.Precision.DEFAULT
        product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
        scores = product(self._queries(head), k, (((1,), (1,)), ((), ())))
        positions = own.shift + self._token(scores.shape)
        slots = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = masked_scores(scores, positions, slots, own.last, spec)
        slots = start + lax.broadcasted_iota(jnp.int32, v.shape, 0)
        v = jnp.where((own.lowest <= slots) & (slots <= own.last), v, jnp.zeros_like(v))
        state = self._best[head], self._total[head], self._acc[head]
        weigh = functools.partial(product, rhs=v, dimension_numbers=(((1,), (0,)), ((), ())))
        best, total, acc = fold(state, scores, lambda weights: weigh(weights.astype(v.dtype)))
        self._best[head], self._total[head], self._acc[head] = best, total, acc

    def _queries(self, head: int) -> Array:
        if self._tokens == self._sizes.tokens:
            return self._q[0, head]
        return jnp.concatenate([self._q[0, head, self._part(g)] for g in range(self._sizes.group)])

    def finish(self) -> None:
        """Writes the piece's rows; the block's other rows are other pieces'."""
        token = self._token((self._tokens, self._sizes.value_dim))
        mine = (self._own.begin <= token) & (token < self._own.end)
        for head in range(self._sizes.kv_heads):
            result = mean(self._acc[head], self._total[head])
            for g in range(self._sizes.group):
                part = self._part(g)
                old = self._out[0, head, part].astype(jnp.float32)
                new = jnp.where(mine, result[g * self._tokens : (g + 1) * self._tokens], old)
                self._out[0, head, part] = new.astype(self._out.dtype)
