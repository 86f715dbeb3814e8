"""Adapters (LoRA) in JAX."""

import jax
import jax.numpy as jnp

from quintet.ops import lora as spec
from quintet.platforms.tpu.kernels.linear import product
from quintet.platforms.tpu.torchax_bridge import serve


@serve(spec.add_lora, static=("first", "columns"))
def add_lora(  # the op's
    y: jax.Array,
    x: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    ranks: jax.Array,
    slots: jax.Array,
    first: int,
    columns: tuple[tuple[int, int], ...],
) -> jax.Array:
    """See the specification. Two products for all adapters: x by the rows of every A, of which a token keeps those of
    its adapter, and these by the rows of every B."""
    adapters, parts, rank, inputs = lora_a.shape
    mine = slots[:, None] == jnp.arange(1, adapters + 1)  # [T, S]
    used = jnp.arange(rank) < ranks[:, first : first + parts, None]  # [S, P, R]
    low = product(x, lora_a.reshape(-1, inputs)).reshape(-1, adapters, parts, rank)
    low = jnp.where(mine[:, :, None, None] & used, low, 0.0)
    pieces, start = [], 0
    for part, width in columns:
        rows = jnp.where(used[:, part, :, None], lora_b[:, :, start : start + width].astype(jnp.float32), 0.0)
        added = product(low[:, :, part].reshape(-1, adapters * rank), rows.reshape(adapters * rank, width).T)
        pieces.append(y[:, start : start + width].astype(jnp.float32) + added)
        start += width
    return jnp.where((slots > 0)[:, None], jnp.concatenate(pieces, axis=1).astype(y.dtype), y)


@serve(spec.scale_adapted)
def scale_adapted(y: jax.Array, gains: jax.Array, offsets: jax.Array, slots: jax.Array) -> jax.Array:
    """See the specification."""
    adapter = jnp.maximum(slots - 1, 0)
    gain, offset = (jnp.take(each, adapter, axis=0, mode="clip") for each in (gains, offsets))
    return jnp.where((slots > 0)[:, None], (y.astype(jnp.float32) * gain + offset).astype(y.dtype), y)


@serve(spec.adapter_rows, static=("adapters", "rows", "first"))
def adapter_rows(ids: jax.Array, slots: jax.Array, adapters: int, rows: int, first: int) -> jax.Array:
    """See the specification."""
    there = (slots > 0) & (slots <= adapters) & (ids >= first) & (ids < first + rows)
    return jnp.where(there, (slots - 1) * rows + ids - first, -1)
