"""Matrix products with quantized weights in JAX, in the forms that XLA fuses: no copy of a weight in a wider type.

Where inputs share scales in groups or blocks, a weight should lie in memory with its outputs side by side (placed with
jax's Layout((1, 0))): then v5e's compiler reads it once, as it is. In the usual order it lays it anew in every call.
"""

import jax
import jax.numpy as jnp

from quintet.ops import quantized as spec
from quintet.platforms.tpu.bridge import serve
from quintet.platforms.tpu.kernels.linear import finish, product

# Up to so many tokens each group's products are added up before the scales come in: by the v5e compiler's count, 0.4 of
# the cycles of scaling the weight for 8 tokens, 0.6 for 16, 1.7 for 64 (N 14336, K 4096, groups of 128).
FEW = 16


@serve(spec.linear_int8, static=("outputs",))
def linear_int8(
    x: jax.Array, weight: jax.Array, scales: jax.Array, bias: jax.Array | None, outputs: spec.Outputs
) -> jax.Array:
    """x [T, K], weight int8 [N, K], scales [N, G] -> [T, N]."""
    return finish(_scaled(x, weight, scales), bias, x.dtype)


@serve(spec.linear_int4, static=("outputs",))
def linear_int4(
    x: jax.Array,
    weight: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    bias: jax.Array | None,
    outputs: spec.Outputs,
) -> jax.Array:
    """x [T, K], weight uint8 [N, K / 2], scales and zeros [N, G] -> [T, N].

    Two products, of the even inputs by the low bits and of the odd ones by the high bits: what is unpacked is
    never put in order.
    """
    num = weight.shape[1]
    wide, middle = _columns(scales, num), spec.MIDDLE if zeros is None else _columns(zeros.astype(jnp.float32), num)

    def half(inputs: jax.Array, bits: jax.Array) -> jax.Array:
        return product(inputs, ((bits.astype(jnp.float32) - middle) * wide).astype(x.dtype))

    return finish(half(x[:, ::2], weight & 15) + half(x[:, 1::2], weight >> 4), bias, x.dtype)


@serve(spec.linear_fp8, static=("block", "outputs"))
def linear_fp8(
    x: jax.Array, weight: jax.Array, scales: jax.Array, bias: jax.Array | None, block: int, outputs: spec.Outputs
) -> jax.Array:
    """x [T, K], weight float8 [N, K], scales as in the specification -> [T, N]."""
    return finish(_scaled(x, weight, _rows(scales, weight, block), block), bias, x.dtype)


@serve(spec.linear_w8a8, static=("outputs",))
def linear_w8a8(
    x: jax.Array, weight: jax.Array, scales: jax.Array, bias: jax.Array | None, outputs: spec.Outputs
) -> jax.Array:
    """x [T, K], weight int8 [N, K], scales [N, 1] -> [T, N]."""
    values, own = _stretched(x.astype(jnp.float32), 127.0)
    sums = product(jnp.round(values).astype(jnp.int8), weight)
    return finish(sums.astype(jnp.float32) * own * scales.T, bias, x.dtype)


@serve(spec.linear_fp8_dynamic, static=("block", "outputs"))
def linear_fp8_dynamic(
    x: jax.Array, weight: jax.Array, scales: jax.Array, bias: jax.Array | None, block: int, outputs: spec.Outputs
) -> jax.Array:
    """x [T, K], weight float8 [N, K], scales as in the specification -> [T, N]."""
    tokens, inputs = x.shape
    largest = float(jnp.finfo(weight.dtype).max)
    if not block:
        values, own = _stretched(x.astype(jnp.float32), largest)
        exact = values.astype(weight.dtype).astype(jnp.bfloat16)  # holds all that fp8 holds, and multiplies fast
        return finish(product(exact, weight.astype(jnp.bfloat16)) * own * scales.T, bias, x.dtype)
    cut = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -inputs % block))).reshape(tokens, -1, block)
    values, own = _stretched(cut, largest)
    known = (values.astype(weight.dtype).astype(jnp.float32) * own).reshape(tokens, -1)[:, :inputs].astype(x.dtype)
    return finish(_scaled(known, weight, _rows(scales, weight, block), block), bias, x.dtype)


def _scaled(x: jax.Array, weight: jax.Array, scales: jax.Array, block: int = 0) -> jax.Array:
    """x [T, K] by weight [N, K] * scales [N or 1, G] -> [T, N] float32; `block` inputs, or K / G, share a scale."""
    inputs, groups = weight.shape[1], scales.shape[1]
    if groups == 1:
        return product(x, weight.astype(x.dtype)) * scales.T
    if x.shape[0] <= FEW and (block or inputs // groups) * groups == inputs:
        return _sum_of_groups(x, weight, scales)
    wide = _columns(scales, inputs, block)
    return product(x, (weight.astype(jnp.float32) * wide).astype(x.dtype))


def _sum_of_groups(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """One product for each group of inputs [G, T, N], each in float32 and scaled before they are added up."""
    groups = scales.shape[1]
    each, by = x.reshape(x.shape[0], groups, -1), weight.astype(x.dtype).reshape(weight.shape[0], groups, -1)
    return (jax.vmap(product, in_axes=1)(each, by) * scales.T[:, None, :]).sum(0)


def _stretched(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """x [..., C] with each row's largest magnitude brought to `largest`, and the scales [..., 1] that undo it."""
    peak = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), spec.SMALLEST)
    return x * (largest / peak), peak / largest


def _columns(x: jax.Array, inputs: int, block: int = 0) -> jax.Array:
    """[N, G] -> [N, inputs]."""
    return jnp.repeat(x, block or inputs // x.shape[1], axis=1)[:, :inputs]


def _rows(scales: jax.Array, weight: jax.Array, block: int) -> jax.Array:
    """A block's scales for each of its rows: [n, m] -> [N, m]."""
    return jnp.repeat(scales, block, axis=0)[: weight.shape[0]] if block else scales
