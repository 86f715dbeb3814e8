"""Rows of a step's tokens in JAX: which are kept, and what stands in the place of some."""

import jax
import jax.numpy as jnp

from quintet.ops import rows as spec
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.take_rows)
def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of x [T, D] by number, rows [L] -> [L, D]."""
    return jnp.take(x, rows, axis=0, mode="clip")  # the default fills with NaN, which takes a second pass


@serve(spec.place_rows)
def place_rows(x: jax.Array, given: jax.Array, places: jax.Array) -> jax.Array:
    """x [T, D] with given[places] where places [T] is not -1."""
    taken = jnp.take(given, places, axis=0, mode="clip").astype(x.dtype)
    return jnp.where(places[:, None] < 0, x, taken)


@serve(spec.choose_rows)
def choose_rows(x: jax.Array, y: jax.Array, places: jax.Array) -> jax.Array:
    """x [T, D] with the rows of y [T, D] where places [T] is not -1."""
    return jnp.where(places[:, None] < 0, x, y)


@serve(spec.beside)
def beside(x: jax.Array, y: jax.Array) -> jax.Array:
    """x [T, A] and y [T, B] -> [T, A + B]."""
    return jnp.concatenate([x, y], axis=-1)
