"""Matrix products with quantized weights in JAX, in the forms that XLA fuses: no copy of a weight in a wider type.

Where inputs share scales in groups or blocks, a weight should lie in memory with its outputs side by side (placed with
jax's Layout((1, 0))): then v5e's compiler reads it once, as it is. In the usual order it lays it anew in every call.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import KINDS, linear
from quintet.ops.quantized import MIDDLE, SMALLEST
from quintet.platforms.tpu.kernels.linear import finish, in_order, product
from quintet.platforms.tpu.torchax_bridge import serve

# Up to so many tokens each group's products are added up before the scales come in: by the v5e compiler's count, 0.4 of
# the cycles of scaling the weight for 8 tokens, 0.6 for 16, 1.7 for 64 (N 14336, K 4096, groups of 128).
FEW = 16


@serve(linear, static=("outputs",), kinds=KINDS)
def quantized(x: jax.Array, weight: Matrix, bias: jax.Array | None, outputs: tuple[int, ...]) -> jax.Array:
    """x [T, K], weight [N, K], or with its tensors' rows [ranks, N / ranks] (see sharding.Placement), bias shaped like
    them -> [T, N] like x."""
    held = _arrays(weight)
    if held.values.ndim == 2:
        return finish(_whole(x, held), bias, x.dtype)
    y = jax.vmap(_whole, in_axes=(None, 0), out_axes=1)(x, held)
    return in_order(finish(y, bias, x.dtype), outputs)


class Arrays(NamedTuple):
    """A matrix's tensors, and its form."""

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None
    mins: jax.Array | None
    format: WeightFormat


def _arrays(weight: Matrix) -> Arrays:
    held: Any = weight  # arrays of JAX, typed as tensors
    return Arrays(held.values, held.scales, held.zeros, held.mins, held.format)


def _whole(x: jax.Array, weight: Arrays) -> jax.Array:
    """[T, N] float32; what is added to a group comes in by the sum of the group's inputs."""
    y, added = BY_KIND[weight.format.kind](x, weight), weight.mins
    if weight.format.activations == 8 and weight.zeros is not None:
        shift = (MIDDLE - weight.zeros.astype(jnp.float32)) * weight.scales
        added = shift if added is None else added + shift
    return y if added is None else y + product(_as_taken(x, weight).sum(-1), added)


def _as_taken(x: jax.Array, weight: Arrays) -> jax.Array:
    """x as products take it, float32 [T, G, K / G]."""
    cut = x.astype(jnp.float32).reshape(x.shape[0], weight.scales.shape[1], -1)
    if weight.format.activations == 16:
        return cut
    values, own = _stretched(cut, 127.0)
    return jnp.round(values) * own


def _rounded(x: jax.Array, weight: Arrays) -> jax.Array:
    return _as_taken(x, weight).reshape(x.shape).astype(x.dtype)


def _fours(x: jax.Array, weight: Arrays) -> jax.Array:
    """Two products, of the even inputs by the low bits and of the odd ones by the high bits: what is unpacked is
    never put in order."""
    values, scales, zeros, _, fmt = weight
    num = values.shape[1]
    wide, middle = _columns(scales, num), MIDDLE if zeros is None else _columns(zeros.astype(jnp.float32), num)

    def half(inputs: jax.Array, bits: jax.Array) -> jax.Array:
        known = looked_up(fmt.codebook, bits) if fmt.codebook else bits.astype(jnp.float32) - middle
        return product(inputs, (known * wide).astype(x.dtype))

    return half(x[:, ::2], values & 15) + half(x[:, 1::2], values >> 4)


def _eights(x: jax.Array, weight: Arrays) -> jax.Array:
    return _scaled(x, weight.values, weight.scales, weight.format.group)


def _by_table(x: jax.Array, weight: Arrays) -> jax.Array:
    if weight.format.activations == 8:
        x = _rounded(x, weight)
    if weight.format.bits == 4:
        return _fours(x, weight)
    return _scaled(x, looked_up(weight.format.codebook, weight.values), weight.scales, weight.format.group)


def looked_up(table: tuple[float, ...], places: jax.Array) -> jax.Array:
    """float32 of uint8, by choices bit after bit, which may become part of a product."""
    known: list[Any] = [*table, *[0.0] * ((1 << (len(table) - 1).bit_length()) - len(table))]
    for bit in range((len(table) - 1).bit_length()):
        odd = (places >> bit) & 1 == 1
        known = [jnp.where(odd, high, low) for low, high in zip(known[::2], known[1::2], strict=True)]
    return jnp.broadcast_to(jnp.asarray(known[0], jnp.float32), places.shape)


def _by_integers(x: jax.Array, weight: Arrays) -> jax.Array:
    values, own = _stretched(x.astype(jnp.float32), 127.0)
    sums = product(jnp.round(values).astype(jnp.int8), weight.values)
    return sums.astype(jnp.float32) * own * weight.scales.T


def _groups_by_integers(x: jax.Array, weight: Arrays) -> jax.Array:
    """Group by group [G, T, N]; of 4 bits the even inputs of a group by the low bits, the odd ones by the high bits.

    Of many tokens that would be too much memory: there x is rounded, and multiplied as floats.
    """
    scales, groups = weight.scales, weight.scales.shape[1]
    if weight.format.bits == 8 and groups == 1:
        return _by_integers(x, weight)
    if len(x) > FEW and groups > 1:
        exact = _eights if weight.format.bits == 8 else _fours
        return exact(_rounded(x, weight), weight._replace(zeros=None))
    stretched, own = _stretched(x.astype(jnp.float32).reshape(len(x), groups, -1), 127.0)
    whole, values = jnp.round(stretched).astype(jnp.int8), weight.values.reshape(len(weight.values), groups, -1)
    each = jax.vmap(product, in_axes=1)
    if weight.format.bits == 8:
        sums = each(whole, values)
    else:
        low, high = ((bits.astype(jnp.int8) - MIDDLE) for bits in (values & 15, values >> 4))
        sums = each(whole[..., ::2], low) + each(whole[..., 1::2], high)
    return (sums.astype(jnp.float32) * own.transpose(1, 0, 2) * scales.T[:, None, :]).sum(0)


def _by_float8(x: jax.Array, weight: Arrays) -> jax.Array:
    values, scales, _, _, fmt = weight
    (tokens, inputs), largest = x.shape, float(jnp.finfo(values.dtype).max)
    if scales.shape[1] == 1:
        stretched, own = _stretched(x.astype(jnp.float32), largest)
        exact = stretched.astype(values.dtype).astype(jnp.bfloat16)  # holds all that fp8 holds, and multiplies fast
        return product(exact, values.astype(jnp.bfloat16)) * own * scales.T
    cut = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -inputs % fmt.group))).reshape(tokens, -1, fmt.group)
    stretched, own = _stretched(cut, largest)
    known = (stretched.astype(values.dtype).astype(jnp.float32) * own).reshape(tokens, -1)[:, :inputs].astype(x.dtype)
    return _scaled(known, values, scales, fmt.group)


BY_KIND = {
    "int8": _eights, "int4": _fours, "fp8": _eights, "w8a8": _groups_by_integers, "w4a8": _groups_by_integers,
    "fp8a8": _by_float8, "table4": _by_table, "table8": _by_table,
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
