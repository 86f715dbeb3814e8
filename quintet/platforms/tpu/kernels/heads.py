"""Products by heads with a weight each, in JAX."""

import jax

from quintet.ops import heads as spec
from quintet.platforms.tpu.kernels.linear import product
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.by_heads, static=("outputs", "turned"))
def by_heads(x: jax.Array, weight: jax.Array, outputs: int, turned: bool) -> jax.Array:
    """x [T, H, K], weight [H, outputs, K], or with `turned` [H, K, outputs] -> [T, H, outputs]."""
    weight = weight.swapaxes(1, 2) if turned else weight  # XLA's product reads either as it lies
    return jax.vmap(product, (1, 0), 1)(x, weight).astype(x.dtype)
