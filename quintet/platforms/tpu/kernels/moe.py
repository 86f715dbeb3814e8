"""The mixture of experts in JAX: rows sorted by expert, then a loop over blocks of them, each a plain product.

The loop reads the weights of experts that somebody chose, straight from where they lie. XLA's ragged product wants them
transposed, and by the v5e compiler's count takes 3 times the cycles for 64 tokens, a thousand times for 1024 (128
experts of 768 features, k 8).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quintet.ops import moe as spec
from quintet.platforms.tpu.bridge import serve
from quintet.platforms.tpu.kernels.activation import gated
from quintet.platforms.tpu.kernels.linear import product


@serve(spec.route, static=("k", "renormalize"))
def route(logits: jax.Array, k: int, renormalize: bool) -> tuple[jax.Array, jax.Array]:
    """logits [T, E] -> weights [T, k] float32, ids [T, k] int32."""
    logits = logits.astype(jnp.float32)
    ids = jax.lax.top_k(logits, k)[1]  # of equal ones it takes the first
    return _weights(jax.nn.softmax(logits, -1), ids, renormalize), ids.astype(jnp.int32)


@serve(spec.route_grouped, static=("k", "groups", "kept", "renormalize"))
def route_grouped(
    logits: jax.Array, bias: jax.Array, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
    """logits [T, E], bias [E] -> weights [T, k] float32, ids [T, k] int32."""
    weights = jax.nn.sigmoid(logits.astype(jnp.float32))
    ranks = weights + bias.astype(jnp.float32)
    if kept < groups:
        each = ranks.reshape(ranks.shape[0], groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(each, 2)[0].sum(-1), kept)[1]  # [T, kept]
        chosen = (best[:, :, None] == jnp.arange(groups)).any(1)
        ranks = jnp.where(chosen[..., None], each, -jnp.inf).reshape(ranks.shape)
    ids = jax.lax.top_k(ranks, k)[1]
    return _weights(weights, ids, renormalize), ids.astype(jnp.int32)


def _weights(scores: jax.Array, ids: jax.Array, renormalize: bool) -> jax.Array:
    weights = jnp.take_along_axis(scores, ids, 1, mode="promise_in_bounds")
    return weights / weights.sum(-1, keepdims=True) if renormalize else weights


@serve(spec.grouped_linear)
def grouped_linear(x: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """x [M, K], weight [E, N, K], counts [E] -> [M, N]."""

    def work(expert: jax.Array, rows: jax.Array) -> jax.Array:
        return product(rows, weight[expert]).astype(x.dtype)

    return _by_expert(x, counts, weight.shape[1:2], work)


@serve(spec.experts, static=("kind",))
def experts(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, ids: jax.Array, kind: str
) -> jax.Array:
    """x [T, D], gate_up [E, 2 I, D], down [E, D, I], weights and ids [T, k] -> [T, D].

    Of weights that are cut (see sharding.Placement), gate_up [E, ranks, 2 I / ranks, D] and down [E, ranks, D,
    I / ranks], each rank's results stay apart up to the end: they are added up once.
    """
    num, k = gate_up.shape[0], ids.shape[1]
    if gate_up.ndim == 3:
        gate_up, down = gate_up[:, None], down[:, None]
    ranks, hidden = down.shape[1:3]
    flat = jnp.where((ids >= 0) & (ids < num), ids, num).reshape(-1)  # [T k]; the last are nobody's
    order = jnp.argsort(flat, stable=True)
    counts = (flat[:, None] == jnp.arange(num)).sum(0, dtype=jnp.int32)

    def work(expert: jax.Array, rows: jax.Array) -> jax.Array:
        inner = gated(product(rows, gate_up[expert]).astype(x.dtype), kind)  # [rows, ranks, I / ranks]
        return jax.vmap(product, (1, 0), 1)(inner, down[expert]).astype(x.dtype)

    outer = _by_expert(jnp.take(x, order // k, axis=0, mode="clip"), counts, (ranks, hidden), work)
    back = jnp.argsort(order)  # where each (token, j) went
    each = jnp.take(outer, back, axis=0, mode="clip").reshape(*ids.shape, ranks, hidden)
    return (each.astype(jnp.float32) * weights[..., None, None]).sum(1).sum(1).astype(x.dtype)


def _by_expert(x: jax.Array, counts: jax.Array, width: tuple[int, ...], work: Callable[..., jax.Array]) -> jax.Array:
    """work(expert, some of its rows) for all rows of x [M, K], which are sorted by expert -> [M, *width].

    A block reaches into the next expert's rows, whose own block comes later and overwrites what came out there.
    """
    rows = x.shape[0]
    size = _block_size(rows, counts.shape[0])
    blocks, num = _blocks(counts, rows, size)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, first = blocks[i]
        done = work(expert, jax.lax.dynamic_slice_in_dim(padded, first, size))
        return jax.lax.dynamic_update_slice_in_dim(out, done, first, 0)

    out = jax.lax.fori_loop(0, num, one, jnp.zeros((rows + size, *width), x.dtype))[:rows]
    theirs = jnp.arange(rows) < counts.sum()
    return jnp.where(theirs.reshape(-1, *[1] * len(width)), out, 0)


def _block_size(rows: int, num: int) -> int:
    """Twice an expert's average, so that most weights are read once; 16 rows fill a register of bfloat16."""
    return min(max(16, 1 << (2 * rows // num - 1).bit_length()), 512)


def _blocks(counts: jax.Array, rows: int, size: int) -> tuple[jax.Array, jax.Array]:
    """[(expert, first row)] of blocks of so many rows, an expert's side by side, and how many of them there are."""
    num = counts.shape[0]
    each = -(-counts // size)
    upto, starts = jnp.cumsum(each), jnp.cumsum(counts) - counts
    places = jnp.arange(min(rows, rows // size + num))
    owners = jnp.minimum((upto <= places[:, None]).sum(1), num - 1)
    firsts = starts[owners] + (places - (upto - each)[owners]) * size
    return jnp.stack([owners, firsts], 1), upto[-1]
