"""The normalisations in JAX; XLA fuses each into one pass over memory."""

import jax
import jax.numpy as jnp

from quintet.ops import norm
from quintet.platforms.tpu.torchax_bridge import serve


@serve(norm.rms_norm, static=("eps", "offset"))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float) -> jax.Array:
    """x [..., D], weight [D] -> [..., D] like x, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    if offset:
        return (y * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return (y.astype(x.dtype) * weight).astype(x.dtype)


@serve(norm.add_rms_norm, static=("eps", "offset"))
def add_rms_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


@serve(norm.layer_norm, static=("eps",))
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """x [..., D], weight and bias [D] -> [..., D] like x, in float32 and rounded once."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
