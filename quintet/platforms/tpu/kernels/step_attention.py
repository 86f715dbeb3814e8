"""Attention over the tokens of the step alone, in JAX: a block of queries at a time, with a running maximum."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from quintet.interface.types import AttentionSpec
from quintet.ops import attention as ops
from quintet.platforms.tpu.kernels.plain_attention import NOTHING, State, fold, mean
from quintet.platforms.tpu.torchax_bridge import serve

BLOCK = 128  # queries, and keys, that are looked at together: what is held does not grow with the step


@serve(ops.attention, static=("spec",))
def attention(q: Array, k: Array, v: Array, batch: Any, spec: AttentionSpec, sinks: Array | None) -> Array:
    """q [T, H, D] over k and v [T, Hkv, D] of each token's own request -> [T, H, D]. A block goes through the keys of
    its own requests alone, since a request's tokens stand side by side. Padded tokens are seen by no other."""
    tokens, heads, dim = q.shape
    queries = _blocks(q.reshape(tokens, spec.kv_heads, -1, dim)).transpose(0, 2, 3, 1, 4)  # [B, Hkv, G, block, D]
    keys, values = (_blocks(x).transpose(0, 2, 1, 3) for x in (k, v))  # [B, Hkv, block, D]
    positions = _blocks(batch.positions)
    owners = _blocks(batch.token_to_seq, mode="edge")
    # the tokens of each token's request
    firsts, ends = batch.query_start_loc[owners], batch.query_start_loc[owners + 1]

    def block(b: Array) -> Array:
        """[Hkv, G, block, D] of one block of queries."""
        rows = queries[b].astype(jnp.float32)

        def over(s: Array, held: tuple[State, Array]) -> tuple[State, Array]:
            state, spoilt = held
            places = s * BLOCK + jnp.arange(BLOCK)
            seen = (firsts[b][:, None] <= places) & (places < ends[b][:, None])
            apart = positions[s] - positions[b][:, None]
            scores = _product("hgtd,hsd->hgts", rows, keys[s].astype(jnp.float32))
            if spec.chunk is not None:
                seen &= apart >= -(positions[b] % spec.chunk)[:, None]
            scores, seen = _masked(scores, apart, seen, spec)
            finite = jnp.isfinite(values[s])
            there = jnp.where(finite, values[s], 0).astype(jnp.float32)  # what one request may not see, another may
            spoilt |= (seen & ~finite.all(-1)[:, None, None]).any(-1, keepdims=True)  # a head's own: none asks another
            return fold(state, scores, lambda weights: _product("hgts,hsd->hgtd", weights, there)), spoilt

        begin, end = firsts[b, 0] // BLOCK, (ends[b, -1] + BLOCK - 1) // BLOCK
        empty = _empty(rows.shape, sinks), jnp.zeros((spec.kv_heads, 1, BLOCK, 1), bool)
        (_, total, acc), spoilt = lax.fori_loop(begin, end, over, empty)
        return jnp.where(spoilt, jnp.nan, mean(acc, total)).astype(q.dtype)

    out = lax.map(block, jnp.arange(queries.shape[0])).transpose(0, 3, 1, 2, 4)
    return out.reshape(-1, heads, dim)[:tokens]


_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _blocks(x: Array, **padding: Any) -> Array:
    """[T, ...] -> [T / BLOCK, BLOCK, ...]."""
    padded = jnp.pad(x, ((0, -x.shape[0] % BLOCK), *((0, 0),) * (x.ndim - 1)), **padding)
    return padded.reshape(-1, BLOCK, *x.shape[1:])


def _masked(scores: Array, apart: Array, seen: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    """Products of q and k [Hkv, G, T, S] -> scores, and what each token sees [T, S]; NOTHING where it does not."""
    scores = scores * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if spec.alibi is not None:
        slopes = jnp.array(spec.alibi, jnp.float32).reshape(*scores.shape[:2], 1, 1)
        scores = scores - slopes * abs(apart)
    if spec.causal:
        seen &= apart <= 0
    if spec.window is not None:
        seen &= (apart > -spec.window) & (apart < spec.window)
    return jnp.where(seen, scores, NOTHING), seen


def _empty(shape: tuple[int, ...], sinks: Array | None) -> State:
    """State of the softmax before any key was seen; a sink is a logit with a V of 0."""
    acc = jnp.zeros(shape, jnp.float32)
    if sinks is None:
        return jnp.full((*shape[:-1], 1), NOTHING, jnp.float32), acc[..., :1], acc
    best = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(*shape[:2], 1, 1), (*shape[:-1], 1))
    return best, jnp.ones_like(best), acc
