"""Ragged paged attention in plain JAX, with the running softmax (Dao et al. 2022) that the Pallas kernels use too."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from quintet.interface.types import AttentionSpec
from quintet.platforms.tpu.kernels.blocks import BLOCK, FROM, KEPT, OWNER, SHIFT, TO, block_tokens

NOTHING = -1e30  # a maximum over no scores; finite, so that differences with it are not NaN
PLAIN_SPAN = 128  # tokens of context that are looked at together; measured on a CPU: 64 to 256 are alike
State = tuple[Array, Array, Array]  # the highest score so far, the sum of weights [.., rows, 1], the sum of V [.., D]


def attend_plain(q: Array, kv: Array, table: Array, pieces: Array, sinks: Array | None, spec: AttentionSpec) -> Array:
    """q [T, H, D] over kv [P, 2 or 1, Hkv, page_size, D], by table [R, N] and pieces [6, W] -> [T, H, value_dim];
    padding gives 0.

    kv may be int16, with bfloat16's bits. Goes through the pieces in order, each through its own context only.
    """
    tokens, heads, dim = q.shape
    size = block_tokens(tokens, table.shape[0])
    padded = jnp.pad(q.reshape(tokens, spec.kv_heads, -1, dim), ((0, size), (0, 0), (0, 0), (0, 0)))
    results = jnp.zeros((*padded.shape[:3], spec.value_dim), q.dtype)
    pages = span_pages(PLAIN_SPAN, spec, table)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))

    def attend(count: int, out: Array, piece: Array) -> Array:
        """Writes `count` tokens from the piece's first on; those that are not the piece's are written again later."""
        start = piece[BLOCK] * size + piece[FROM]
        first, last = piece[SHIFT] + piece[FROM], last_position(piece[SHIFT] + piece[TO], piece[KEPT], spec)
        rows = lax.dynamic_slice_in_dim(padded, start, count)
        context = _Context(kv, table[piece[OWNER]], pages, first, first_position(first, spec), last)
        result = _over_context(rows, context, sinks, spec)
        return lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), start, 0)

    def step(w: Array, out: Array) -> Array:
        piece = pieces[:, w]
        alone = piece[TO] - piece[FROM] == 1
        return lax.cond(alone, functools.partial(attend, 1), functools.partial(attend, size), out, piece)

    out = lax.fori_loop(0, used_pieces(pieces), step, results)[:tokens].reshape(tokens, heads, spec.value_dim)
    return zero_padding(out, pieces, size)


def last_position(end: Array, kept: Array, spec: AttentionSpec) -> Array:
    """The last position that tokens before `end` look at, in a request that keeps so many."""
    return (end if spec.causal else kept) - 1


def first_position(first: Array, spec: AttentionSpec) -> Array:
    """The first position that a token at `first`, or one after it, looks at."""
    if spec.chunk is not None:
        return first - lax.rem(first, jnp.int32(spec.chunk))
    return jnp.int32(0) if spec.window is None else jnp.maximum(first - spec.window + 1, 0)


@dataclass(frozen=True)
class _Context:
    """Context of one piece: a request's pages, `pages` of them together, from position `lowest` to `last`."""

    kv: Array
    own: Array  # [N], N a multiple of `pages`
    pages: int
    first: Array  # of the piece's own positions
    lowest: Array
    last: Array

    def span(self, i: Array, value_dim: int) -> tuple[Array, Array]:
        """K and V of the i-th span [Hkv, S, D], float32. V is 0 outside `lowest` to `last`: anything may be there."""
        _, parts, kv_heads, size, dim = self.kv.shape
        ids = lax.dynamic_slice_in_dim(self.own, i * self.pages, self.pages)
        matrices = (ids * parts + jnp.arange(parts)[:, None])[:, None] * kv_heads + jnp.arange(kv_heads)[:, None]
        found = self.kv.reshape(-1, size, dim).at[matrices].get(mode="promise_in_bounds")  # [2, Hkv, pages, size, D]
        if found.dtype == jnp.int16:
            found = lax.bitcast_convert_type(found, jnp.bfloat16)
        found = found.reshape(parts, kv_heads, -1, dim).astype(jnp.float32)
        slots = i * self.pages * size + jnp.arange(self.pages * size)[:, None]
        return found[0], jnp.where((self.lowest <= slots) & (slots <= self.last), found[-1, ..., :value_dim], 0)


def _over_context(rows: Array, context: _Context, sinks: Array | None, spec: AttentionSpec) -> Array:
    """rows [Q, Hkv, G, D] at consecutive positions from context.first on -> [Q, Hkv, G, value_dim], float32."""
    count, kv_heads, group, dim = rows.shape
    q = rows.transpose(1, 2, 0, 3).reshape(kv_heads, group * count, dim).astype(jnp.float32)
    positions = jnp.tile(context.first + jnp.arange(count), group)[:, None]
    length = context.pages * spec.page_size
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

    def over(i: Array, state: State) -> State:
        k, v = context.span(i, spec.value_dim)
        slots = i * length + jnp.arange(length)
        scores = masked_scores(product("hrd,hsd->hrs", q, k), positions, slots, context.last, spec)
        return fold(state, scores, lambda weights: product("hrs,hsd->hrd", weights, v))

    best = jnp.full((kv_heads, group * count, 1), NOTHING, jnp.float32)
    total = jnp.zeros_like(best)
    if sinks is not None:
        best = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, group), count, 1)[..., None]
        total = jnp.ones_like(best)
    acc = jnp.zeros((*q.shape[:2], spec.value_dim), jnp.float32)
    spans = context.lowest // length, (context.last + length) // length
    _, total, acc = lax.fori_loop(*spans, over, (best, total, acc))
    return mean(acc, total).reshape(kv_heads, group, count, -1).transpose(2, 0, 1, 3)


def masked_scores(scores: Array, positions: Array, slots: Array, last: Array, spec: AttentionSpec) -> Array:
    """Products of q and k [.., rows, S] -> scores, NOTHING where a row at its position may not look at a slot."""
    scores = scores * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    seen = slots <= (positions if spec.causal else last)
    if spec.window is not None:
        seen &= slots > positions - spec.window
    if spec.window is not None and not spec.causal:
        seen &= slots < positions + spec.window
    if spec.chunk is not None:
        seen &= slots >= positions - lax.rem(positions, jnp.full_like(positions, spec.chunk))
    return jnp.where(seen, scores, NOTHING)


def fold(state: State, scores: Array, weigh: Callable[[Array], Array]) -> State:
    """Takes another span in. What a row gathered before it saw anything is multiplied by 0 when it does."""
    best, total, acc = state
    higher = jnp.maximum(best, scores.max(-1, keepdims=True))
    weights, shrink = jnp.exp(scores - higher), jnp.exp(best - higher)
    return higher, total * shrink + weights.sum(-1, keepdims=True), acc * shrink + weigh(weights)


def mean(acc: Array, total: Array) -> Array:
    """The mean of V; 0 of a row that saw nothing. What saw anything has a total of about 1 at least."""
    return acc / jnp.maximum(total, 1e-30)


def span_pages(tokens: int, spec: AttentionSpec, table: Array) -> int:
    return max(1, min(table.shape[1], tokens // spec.page_size))


def used_pieces(pieces: Array) -> Array:
    return jnp.sum(pieces[FROM] < pieces[TO])


def zero_padding(out: Array, pieces: Array, size: int) -> Array:
    """Tokens after the last piece's have been computed from anything."""
    last = pieces[:, jnp.maximum(used_pieces(pieces) - 1, 0)]
    real = jnp.arange(out.shape[0]) < last[BLOCK] * size + last[TO]
    return jnp.where(real[:, None, None], out, 0)
