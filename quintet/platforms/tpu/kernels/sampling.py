"""Sampling in JAX. Cuts are found by bisection: no row is sorted, and one program serves every top_k and top_p."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quintet.ops import embedding, random, sampling
from quintet.ops.sampling import NEVER
from quintet.platforms.tpu.torchax_bridge import serve

Array = jax.Array
Drawn = Any  # a Draw of arrays
SIGN = -(2**31)  # the least int32


@serve(sampling.widen, static=("count", "copy"))
def widen(logits: Array, count: int, copy: bool) -> Array:
    """[L, V] -> [count, V] float32; arrays are never overwritten, so a copy is none."""
    return logits[:count].astype(jnp.float32)


@serve(sampling.greedy)
def greedy(logits: Array) -> Array:
    """[R, V] -> [R] int32. Two plain reductions are quicker than one that carries the index along."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    best = _best(logits)
    first = jnp.where(logits == best[:, None], ids, logits.shape[1]).min(-1)
    return jnp.where(jnp.isfinite(best), first, -1)


def _best(logits: Array) -> Array:
    """The largest logit [R], NaN where a row holds one: XLA's maximum may lose it."""
    return jnp.where(jnp.isnan(logits).any(-1), jnp.nan, logits.max(-1))


@serve(sampling.scale_logits)
def scale_logits(logits: Array, temperature: Array) -> Array:
    """[R, V] / [R]."""
    return logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]


@serve(sampling.filter_logits, static=("width",))
def filter_logits(logits: Array, draw: Drawn, width: int) -> Array:
    """Scaled logits [R, V]; `width` 0 says that no row has top_k or top_p, and its size is not used."""
    least = _best(logits) + jnp.log(draw.min_p)
    kept = logits >= least[:, None]
    if width:
        ranks = _ranks(logits)
        last = _last_of_top_k(ranks, draw.top_k)
        last = _last_of_top_p(logits, ranks, kept & (ranks >= last[:, None]), last, draw.top_p)
        kept &= ranks >= last[:, None]
    return jnp.where(kept, logits, NEVER)


def _last_of_top_k(ranks: Array, top_k: Array) -> Array:
    """The rank [R] of the k-th largest; that of the least where top_k is off."""
    counts = jnp.where(top_k > 0, top_k, 0)

    def reached(threshold: Array) -> Array:
        return jnp.sum(ranks >= threshold[:, None], -1, dtype=jnp.int32) >= counts

    found = lax.cond(jnp.any(top_k > 0), lambda: _largest(reached, top_k), lambda: jnp.full_like(top_k, SIGN))
    return jnp.where(top_k > 0, found, SIGN)


def _last_of_top_p(logits: Array, ranks: Array, live: Array, last: Array, top_p: Array) -> Array:
    """The rank [R] of the last live token that top_p leaves; `last` where it is off."""
    largest = logits.max(-1, keepdims=True)

    def search() -> Array:
        mass = jnp.where(live, jnp.exp(logits - largest), 0.0)
        enough = top_p * mass.sum(-1)

        def reached(threshold: Array) -> Array:
            return jnp.where(ranks >= threshold[:, None], mass, 0.0).sum(-1) >= enough

        return jnp.minimum(_largest(reached, last), ranks.max(-1))  # the likeliest stays, whatever top_p is

    found = lax.cond(jnp.any(top_p < 1), search, lambda: last)
    return jnp.where(top_p < 1, jnp.maximum(found, last), last)


def _largest(reached: Callable[[Array], Array], like: Array) -> Array:
    """The largest int32 threshold [R] that is reached; every smaller one is too. One bit a round, the highest first."""

    def round_(index: Array, threshold: Array) -> Array:
        higher = threshold ^ (1 << (31 - index))  # of the sign, too: below it stand the negative numbers
        return jnp.where(reached(higher), higher, threshold)

    return lax.fori_loop(0, 32, round_, jnp.full_like(like, SIGN))


def _ranks(logits: Array) -> Array:
    """int32 in the order of float32 logits; those that are equal have equal ones."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)  # one zero, not two
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@serve(sampling.sample, static=("width",))
def sample(logits: Array, draw: Drawn, width: int) -> Array:
    """[R, V] float32 -> [R] int32, as the Gumbel-max of the scaled and filtered logits."""
    kept = filter_logits(scale_logits(logits, draw.temperature), draw, width)
    noise = gumbel(draw.keys, draw.positions, lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1))
    return greedy(kept + jnp.where((draw.temperature > 0)[:, None], noise, 0.0))


@serve(random.gumbel)
def gumbel(keys: Array, positions: Array, token_ids: Array) -> Array:
    """keys [R, 2], positions [R], token_ids [R or 1, C] -> [R, C] float32.

    Both words of a counter are computed for each of its two tokens: that is cheaper than to interleave them.
    """
    key = keys[:, 0:1], keys[:, 1:2]
    x0, x1 = _threefry2x32(key, (positions[:, None], lax.shift_right_logical(token_ids, 1)))
    words = jnp.where((token_ids & 1) == 0, x0, x1)
    uniform = (lax.shift_right_logical(words, 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    schedule = (key[0], key[1], key[0] ^ key[1] ^ random.PARITY)
    x0, x1 = counter[0] + key[0], counter[1] + key[1]
    for group in range(5):
        for by in random.ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = ((x1 << by) | lax.shift_right_logical(x1, 32 - by)) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + (group + 1)
    return x0, x1


@serve(sampling.top_logprobs, static=("num", "normalize"))
def top_logprobs(
    logits: Array, token_ids: Array, num: int, normalize: bool, wanted: Array
) -> tuple[Array, Array, Array]:
    """logits [R, V], token_ids and wanted [R] -> ids and values [R, num + 1], ranks [R]."""
    logits = logits.astype(jnp.float32)
    ids = jnp.maximum(token_ids, 0)[:, None]
    values = jnp.take_along_axis(logits, ids, 1)
    ranks = jnp.sum(logits > values, -1, dtype=jnp.int32) + 1
    if num:
        likeliest, best = _likeliest(logits, num)
        ids, values = jnp.concatenate([ids, likeliest], 1), jnp.concatenate([values, best], 1)
    if normalize:
        largest = logits.max(-1, keepdims=True)
        values = values - largest - jnp.log(jnp.exp(logits - largest).sum(-1, keepdims=True))
    asked = wanted[:, None] != 0
    return jnp.where(asked, ids, 0), jnp.where(asked, values, 0.0), jnp.where(asked[:, 0], ranks, 0)


def _likeliest(logits: Array, num: int) -> tuple[Array, Array]:
    """ids and logits [R, num] of the largest, best first, equal ones in order of their ids."""
    if num < logits.shape[1]:
        best, ids = lax.top_k(jnp.where(logits == 0, 0.0, logits), num)  # it tells the two zeros apart
        return ids, best
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    _, ids, best = lax.sort((~_ranks(logits), ids, logits), num_keys=1, is_stable=True)
    return ids, best


@serve(sampling.penalize)
def penalize(logits: Array, rows: Array, ids: Array, counts: Array, penalties: Array) -> Array:
    """logits [R, V], places and counts [M], penalties [R, 3]."""
    repetition, frequency, presence = penalties[rows].T
    values = logits[rows, ids]
    values = jnp.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - jnp.where(counts > 0, presence, 0.0)
    return logits.at[rows, ids].set(values)


@serve(sampling.bias_tokens)
def bias_tokens(logits: Array, rows: Array, ids: Array, values: Array) -> Array:
    """logits [R, V], places and values [M]."""
    return logits.at[rows, ids].set(logits[rows, ids] + values)


@serve(sampling.ban_tokens)
def ban_tokens(logits: Array, rows: Array, ids: Array) -> Array:
    """logits [R, V], places [M]."""
    return logits.at[rows, ids].set(NEVER)


@serve(sampling.keep_tokens)
def keep_tokens(logits: Array, bits: Array) -> Array:
    """logits [R, V], bits [R, ceil(V / 32)]."""
    rows, words = bits.shape
    kept = (bits[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(kept.reshape(rows, 32 * words)[:, : logits.shape[1]] != 0, logits, NEVER)


@serve(embedding.place_tokens)
def place_tokens(token_ids: Array, sampled: Array, rows: Array) -> Array:
    """token_ids and rows [T], sampled [S]."""
    return jnp.where(rows < 0, token_ids, jnp.maximum(sampled[jnp.maximum(rows, 0)], 0))
