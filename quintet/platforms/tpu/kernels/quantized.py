"""Matrix products with quantized weights in JAX, in the forms that XLA fuses: no copy of a weight in a wider type.

Where inputs share scales in groups or blocks, a weight should lie in memory with its outputs side by side (placed with
jax's Layout((1, 0))): then v5e's compiler reads it once, as it is. In the usual order it lays it anew in every call.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from quintet.ops.linear import linear
from quintet.ops.quantized import MIDDLE, SMALLEST
from quintet.platforms.tpu.bridge import serve
from quintet.platforms.tpu.kernels.linear import finish, in_order, product
from quintet.weights import Form, Matrix

# Up to so many tokens each group's products are added up before the scales come in: by the v5e compiler's count, 0.4 of
# the cycles of scaling the weight for 8 tokens, 0.6 for 16, 1.7 for 64 (N 14336, K 4096, groups of 128).
FEW = 16


@serve(linear, static=("outputs",), forms=("int8", "int4", "fp8", "w8a8", "w4a8", "fp8a8"))
def quantized(x: jax.Array, weight: Matrix, bias: jax.Array | None, outputs: tuple[int, ...]) -> jax.Array:
    """x [T, K], weight [N, K], or with its tensors' rows [ranks, N / ranks] (see sharding.Placement), bias shaped like
    them -> [T, N] like x."""
    multiply, values = BY_KIND[weight.form.kind], _arrays(weight).values
    if values.ndim == 2:
        return finish(multiply(x, _arrays(weight)), bias, x.dtype)
    y = jax.vmap(multiply, in_axes=(None, 0), out_axes=1)(x, _arrays(weight))
    return in_order(finish(y, bias, x.dtype), outputs)


class Arrays(NamedTuple):
    """A matrix's tensors, and its form."""

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    form: Form


def _arrays(weight: Matrix) -> Arrays:
    held: Any = weight  # arrays of JAX, typed as tensors
    return Arrays(held.values, held.scales, held.zeros, held.form)


def _fours(x: jax.Array, weight: Arrays) -> jax.Array:
    """Two products, of the even inputs by the low bits and of the odd ones by the high bits: what is unpacked is
    never put in order."""
    values, scales, zeros, _ = weight
    num = values.shape[1]
    wide, middle = _columns(scales, num), MIDDLE if zeros is None else _columns(zeros.astype(jnp.float32), num)

    def half(inputs: jax.Array, bits: jax.Array) -> jax.Array:
        return product(inputs, ((bits.astype(jnp.float32) - middle) * wide).astype(x.dtype))

    return half(x[:, ::2], values & 15) + half(x[:, 1::2], values >> 4)


def _eights(x: jax.Array, weight: Arrays) -> jax.Array:
    return _scaled(x, weight.values, weight.scales, weight.form.group)


def _by_integers(x: jax.Array, weight: Arrays) -> jax.Array:
    values, own = _stretched(x.astype(jnp.float32), 127.0)
    sums = product(jnp.round(values).astype(jnp.int8), weight.values)
    return sums.astype(jnp.float32) * own * weight.scales.T


def _fours_by_integers(x: jax.Array, weight: Arrays) -> jax.Array:
    """Group by group [G, T, N]; of each group the even inputs by the low bits, the odd ones by the high bits."""
    packed, scales, _, _ = weight
    groups = scales.shape[1]
    stretched, own = _stretched(x.astype(jnp.float32).reshape(len(x), groups, -1), 127.0)
    whole, packed = jnp.round(stretched).astype(jnp.int8), packed.reshape(len(packed), groups, -1)

    def half(values: jax.Array, bits: jax.Array) -> jax.Array:
        return jax.vmap(product, in_axes=1)(values, bits.astype(jnp.int8) - MIDDLE)

    sums = half(whole[..., ::2], packed & 15) + half(whole[..., 1::2], packed >> 4)
    return (sums.astype(jnp.float32) * own.transpose(1, 0, 2) * scales.T[:, None, :]).sum(0)


def _by_float8(x: jax.Array, weight: Arrays) -> jax.Array:
    values, scales, _, form = weight
    (tokens, inputs), largest = x.shape, float(jnp.finfo(values.dtype).max)
    if scales.shape[1] == 1:
        stretched, own = _stretched(x.astype(jnp.float32), largest)
        exact = stretched.astype(values.dtype).astype(jnp.bfloat16)  # holds all that fp8 holds, and multiplies fast
        return product(exact, values.astype(jnp.bfloat16)) * own * scales.T
    cut = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -inputs % form.group))).reshape(tokens, -1, form.group)
    stretched, own = _stretched(cut, largest)
    known = (stretched.astype(values.dtype).astype(jnp.float32) * own).reshape(tokens, -1)[:, :inputs].astype(x.dtype)
    return _scaled(known, values, scales, form.group)


BY_KIND = {
    "int8": _eights, "int4": _fours, "fp8": _eights, "w8a8": _by_integers, "w4a8": _fours_by_integers,
    "fp8a8": _by_float8,
}  # fmt: skip


def _scaled(x: jax.Array, weight: jax.Array, scales: jax.Array, group: int) -> jax.Array:
    """x [T, K] by weight [N, K] * scales [N, G] -> [T, N] float32; `group` inputs share a scale."""
    inputs, groups = weight.shape[1], scales.shape[1]
    if groups == 1:
        return product(x, weight.astype(x.dtype)) * scales.T
    if x.shape[0] <= FEW and group * groups == inputs:
        return _sum_of_groups(x, weight, scales)
    wide = _columns(scales, inputs, group)
    return product(x, (weight.astype(jnp.float32) * wide).astype(x.dtype))


def _sum_of_groups(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """One product for each group of inputs [G, T, N], each in float32 and scaled before they are added up."""
    groups = scales.shape[1]
    each, by = x.reshape(x.shape[0], groups, -1), weight.astype(x.dtype).reshape(weight.shape[0], groups, -1)
    return (jax.vmap(product, in_axes=1)(each, by) * scales.T[:, None, :]).sum(0)


def _stretched(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """x [..., C] with each row's largest magnitude brought to `largest`, and the scales [..., 1] that undo it."""
    peak = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), SMALLEST)
    return x * (largest / peak), peak / largest


def _columns(x: jax.Array, inputs: int, block: int = 0) -> jax.Array:
    """[N, G] -> [N, inputs]."""
    return jnp.repeat(x, block or inputs // x.shape[1], axis=1)[:, :inputs]
