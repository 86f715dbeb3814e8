"""Products by heads with a weight each, in JAX."""

import jax

from quintet.ops import linear as spec
from quintet.platforms.tpu.kernels.linear import product
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.by_heads, static=("outputs", "transposed"))
def by_heads(x: jax.Array, weight: jax.Array, outputs: int, transposed: bool) -> jax.Array:
    """x [T, H, K], weight [H, outputs, K], or with `transposed` [H, K, outputs] -> [T, H, outputs]."""
    weight = weight.swapaxes(1, 2) if transposed else weight  # XLA's product reads either as it lies
    return jax.vmap(product, (1, 0), 1)(x, weight).astype(x.dtype)
