"""The look-up of rows in JAX."""

import jax
import jax.numpy as jnp

from quintet.ops import embedding as spec
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.embedding, static=("first", "partial"))
def embedding(ids: jax.Array, weight: jax.Array, first: int, partial: bool) -> jax.Array:
    """ids [T], weight [V, D] -> [T, D]; a partial table holds the rows from `first` on, others give 0."""
    if not partial:
        return jnp.take(weight, ids, axis=0, mode="clip")  # the default fills with NaN, which takes a second pass
    local = ids - first
    inside = (local >= 0) & (local < weight.shape[0])
    return jnp.where(inside[:, None], jnp.take(weight, local, axis=0, mode="clip"), 0)
