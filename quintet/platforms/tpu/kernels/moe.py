"""The mixture of experts in JAX: rows sorted by expert, then a loop over blocks of them, each a plain product.

The loop reads the weights of experts that tokens chose, straight from where they lie. XLA's ragged product wants them
transposed, and by the v5e compiler's count takes 3 times the cycles for 64 tokens, a thousand times for 1024 (128
experts of 768 features, k 8).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from quintet.interface.weights import Matrix
from quintet.ops import moe as spec
from quintet.platforms.tpu.kernels.activation import gated
from quintet.platforms.tpu.kernels.linear import product
from quintet.platforms.tpu.torchax_bridge import serve


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
    ids = _of_groups(weights + bias.astype(jnp.float32), k, (groups, kept), 2)
    return _weights(weights, ids, renormalize), ids.astype(jnp.int32)


@serve(spec.route_limited, static=("k", "groups", "kept", "renormalize"))
def route_limited(
    logits: jax.Array, bias: jax.Array, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[jax.Array, jax.Array]:
    """logits [T, E], bias [E] -> weights [T, k] float32, ids [T, k] int32."""
    weights = jax.nn.softmax(logits.astype(jnp.float32), -1)
    ids = _of_groups(weights + bias.astype(jnp.float32), k, (groups, kept), 1)
    return _weights(weights, ids, renormalize), ids.astype(jnp.int32)


def _of_groups(ranks: jax.Array, k: int, sizes: tuple[int, int], summed: int) -> jax.Array:
    """The k best experts [T, k] of the `kept` best of the groups, which rank by the sum of so many of their largest;
    sizes: (groups, kept)."""
    groups, kept = sizes
    if kept < groups:
        each = ranks.reshape(ranks.shape[0], groups, -1)
        best = jax.lax.top_k(jax.lax.top_k(each, summed)[0].sum(-1), kept)[1]  # [T, kept]
        chosen = (best[:, :, None] == jnp.arange(groups)).any(1)
        ranks = jnp.where(chosen[..., None], each, -jnp.inf).reshape(ranks.shape)
    return jax.lax.top_k(ranks, k)[1]


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
    if gate_up.ndim == 3:
        gate_up, down = gate_up[:, None], down[:, None]

    def work(expert: jax.Array, rows: jax.Array) -> jax.Array:
        inner = gated(product(rows, gate_up[expert]).astype(x.dtype), kind)  # [rows, ranks, I / ranks]
        return jax.vmap(product, (1, 0), 1)(inner, down[expert]).astype(x.dtype)

    each = _mixed(x, ids, down.shape[:3], work)
    return (each.astype(jnp.float32) * weights[..., None, None]).sum(1).sum(1).astype(x.dtype)


@serve(spec.biased_experts, static=("clamp",))
def biased_experts(
    x: jax.Array,
    stacks: tuple[Matrix, Matrix],
    biases: tuple[jax.Array, jax.Array],
    weights: jax.Array,
    ids: jax.Array,
    clamp: tuple[float, float],
) -> jax.Array:
    """x [T, D], stacks [E, 2 I, D] and [E, D, I], whole and plain, and biases [E, 2 I] and [E, D] -> [T, D]."""
    gate_up: Any = stacks[0].values  # arrays of JAX, typed as tensors
    down: Any = stacks[1].values
    alpha, limit = clamp

    def work(expert: jax.Array, rows: jax.Array) -> jax.Array:
        both = product(rows, gate_up[expert]).astype(x.dtype) + biases[0][expert]
        pairs = both.astype(jnp.float32).reshape(both.shape[0], -1, 2)
        gate, up = jnp.minimum(pairs[:, :, 0], limit), jnp.clip(pairs[:, :, 1], -limit, limit)
        inner = ((up + 1) * (gate / (1 + jnp.exp(gate * -alpha)))).astype(x.dtype)
        return (product(inner, down[expert]).astype(x.dtype) + biases[1][expert])[:, None]

    each = _mixed(x, ids, (down.shape[0], 1, down.shape[1]), work)
    return (each[:, :, 0].astype(jnp.float32) * weights[..., None]).sum(1).astype(x.dtype)


def _mixed(x: jax.Array, ids: jax.Array, shape: tuple[int, ...], work: Callable[..., jax.Array]) -> jax.Array:
    """work(expert, rows [M, D]) -> [M, ranks, D] for each token and expert of it -> [T, k, ranks, D], 0 where an id is
    no expert's; shape: (experts, ranks, D)."""
    (num, ranks, hidden), k = shape, ids.shape[1]
    flat = jnp.where((ids >= 0) & (ids < num), ids, num).reshape(-1)  # [T k]; `num` has no expert
    order = jnp.argsort(flat, stable=True)
    counts = (flat[:, None] == jnp.arange(num)).sum(0, dtype=jnp.int32)
    outer = _by_expert(jnp.take(x, order // k, axis=0, mode="clip"), counts, (ranks, hidden), work)
    back = jnp.argsort(order)  # where each (token, j) went
    return jnp.take(outer, back, axis=0, mode="clip").reshape(*ids.shape, ranks, hidden)


def _by_expert(x: jax.Array, counts: jax.Array, width: tuple[int, ...], work: Callable[..., jax.Array]) -> jax.Array:
    """work(expert, some of its rows) for all rows of x [M, K], which are sorted by expert -> [M, *width].

    A block reaches into the next expert's rows; the block of that expert comes later and overwrites their results.
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
