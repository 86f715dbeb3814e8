"""The rotary position embedding in JAX."""

import jax
import jax.numpy as jnp

from quintet.ops import rotary as spec
from quintet.platforms.tpu.bridge import serve


@serve(spec.rotary)
def rotary(q: jax.Array, k: jax.Array, table: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q [T, H, D], k [T, Hkv, D], table [max_position, rot] float32, positions [T]."""
    angles = jnp.take(table, positions, axis=0, mode="clip")[:, None, :].astype(q.dtype)
    cos, sin = jnp.split(angles, 2, axis=-1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
