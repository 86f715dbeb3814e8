"""The rotary position embedding in JAX."""

import jax
import jax.numpy as jnp

from quintet.ops import rotary as spec
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.rotary)
def rotary(q: jax.Array, k: jax.Array, table: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q [T, H, D], k [T, Hkv, D], table [max_position, rot] float32, positions [T]."""
    angles = jnp.take(table, positions, axis=0, mode="clip")[:, None, :].astype(q.dtype)
    cos, sin = jnp.split(angles, 2, axis=-1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


@serve(spec.pair_rotary)
def pair_rotary(q: jax.Array, k: jax.Array, table: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of neighbours, which come out as halves."""
    q, k = (_apart(x, table.shape[1]) for x in (q, k))
    return rotary(q, k, table, positions)


def _apart(x: jax.Array, rot: int) -> jax.Array:
    return jnp.concatenate([x[..., 0:rot:2], x[..., 1:rot:2], x[..., rot:]], axis=-1)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
