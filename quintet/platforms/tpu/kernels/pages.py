"""Pages as words and back, as JAX operations. Nothing of the cache but these pages is moved: it is donated and kept."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from torch import Tensor

from quintet.ops.pages import WORD, gather_pages, scatter_pages
from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view


@jax.jit
def _gather(kept: Array, pages: Array) -> Array:
    rows = jnp.take(kept, pages, axis=0, mode="clip").reshape(pages.shape[0], -1)
    group = max(1, WORD // rows.dtype.itemsize)  # numbers in a word
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % group)))
    if rows.dtype.itemsize > WORD:
        return lax.bitcast_convert_type(rows, jnp.int32).reshape(pages.shape[0], -1)
    grouped = rows.reshape(pages.shape[0], -1, group) if group > 1 else rows
    return lax.bitcast_convert_type(grouped, jnp.int32)


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(kept: Array, pages: Array, content: Array) -> Array:
    rows, words = content, kept.dtype.itemsize // WORD
    if words > 1:
        rows = rows[:, : rows.shape[1] // words * words].reshape(rows.shape[0], -1, words)
    rows = lax.bitcast_convert_type(rows, kept.dtype).reshape(content.shape[0], -1)
    size = kept.size // kept.shape[0]
    return kept.at[pages].set(rows[:, :size].reshape(-1, *kept.shape[1:]))


@gather_pages.provide("jax")
def gather(kept: Tensor, pages: Tensor) -> Tensor:
    words: Tensor = torch_view(_gather(*jax_view((kept, pages))))
    return words


@scatter_pages.provide("jax")
def scatter(kept: Tensor, pages: Tensor, content: Tensor) -> Tensor:
    written: Tensor = _scatter(*jax_view((kept, pages, content)))
    return written if isinstance(kept, jax.Array) else torch_view(written)  # the engine's cache is arrays of JAX
