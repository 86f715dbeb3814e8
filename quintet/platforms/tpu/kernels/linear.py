"""Matrix products with weights in JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from quintet.interface.weights import Matrix
from quintet.ops import linear as spec
from quintet.platforms.tpu.torchax_bridge import serve


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., K] @ weight [..., N, K].T -> [..., N], added up in float32, or in int32 for integers."""
    # left alone, a TPU computes a product of float32 in one pass of bfloat16
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    kind = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    axes = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    return jax.lax.dot_general(x, weight, axes, precision=precision, preferred_element_type=kind)


def finish(y: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The bias is added in float32, and the sum is rounded once."""
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)


@serve(spec.linear, static=("outputs",))
def linear(x: jax.Array, weight: Matrix, bias: jax.Array | None, outputs: tuple[int, ...]) -> jax.Array:
    """x [T, K], weight [N, K] or [ranks, N / ranks, K] (see sharding.Placement), bias shaped like the
    weight's rows -> [T, N] like x."""
    values: Any = weight.values  # arrays of JAX, typed as tensors
    y = finish(product(x, values), bias, x.dtype)
    return y if values.ndim == 2 else in_order(y, outputs)


def in_order(y: jax.Array, outputs: tuple[int, ...]) -> jax.Array:
    """[T, ranks, N / ranks], each rank's shares of the outputs -> [T, N], one output after the other.

    A caller that slices the outputs apart at their borders gets each as its ranks computed it: XLA sees through it.
    """
    tokens, ranks, _ = y.shape
    shares = jnp.split(y, [sum(outputs[:i]) // ranks for i in range(1, len(outputs))], axis=2)
    return jnp.concatenate([share.reshape(tokens, -1) for share in shares], axis=1)
