"""The update of the KV cache by runs: whole pages are merged with the tokens that land in them, in place."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quintet.platforms.tpu.kernels.blocks import FROM, LEAD, PAGE, TO


def write_plain(kv: Array, k: Array, v: Array | None, runs: Array) -> Array:
    """kv [P, 2, Hkv, page_size, D] with k and v [T, Hkv, D], in kv's type, put where runs [4, U] say; [P, 1, ...]
    without v.

    In place where kv is donated: a page after the other, and only as many as there are runs.
    """
    size = kv.shape[3]
    new = jnp.pad(_together(k, v), ((0, 0), (0, 0), (size, size), (0, 0)))  # a page's other tokens

    def write(u: Array, kv: Array) -> Array:
        page, lead, first, end = runs[:, u]
        own = lax.dynamic_slice_in_dim(new, lead + size, size, axis=2)
        offsets = jnp.arange(size)[:, None]
        old = lax.dynamic_index_in_dim(kv, page, keepdims=False)
        return lax.dynamic_update_index_in_dim(kv, jnp.where((first <= offsets) & (offsets < end), own, old), page, 0)

    return lax.fori_loop(0, jnp.sum(runs[FROM] < runs[TO]), write, kv)


def _together(k: Array, v: Array | None) -> Array:
    """[2 or 1, Hkv, T, D]: a page's order, but for its token axis."""
    return jnp.stack([k] if v is None else [k, v]).transpose(0, 2, 1, 3)


def write_paged(kv: Array, k: Array, v: Array | None, runs: Array, *, interpret: bool = False) -> Array:
    """The same in Pallas: a grid step per run fetches its page, merges it and puts it back where it was.

    A page's tokens lie in two neighbouring blocks of page_size new tokens; consecutive runs share them, so that decode
    moves little more than pages. Runs are on different pages, but for the unused: those put page 0 back as it is.
    """
    size, count = kv.shape[3], runs.shape[1]
    new = jnp.pad(_together(k, v), ((0, 0), (0, 0), (size, size + -k.shape[0] % size), (0, 0)))
    page = (1, *kv.shape[1:])

    def tokens(u: Array, runs: Array, which: int) -> tuple[Any, ...]:
        return 0, 0, lax.div(runs[LEAD * count + u] + size, size) + which, 0

    own = pl.BlockSpec(page, lambda u, runs: (runs[PAGE * count + u], 0, 0, 0, 0))
    written: Array = pl.pallas_call(
        _merge,
        out_shape=jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[*(pl.BlockSpec(page[1:], functools.partial(tokens, which=i)) for i in (0, 1)), own],
            out_specs=own,
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=16 * math.prod(page) * 4 + 2**23
        ),
        interpret=interpret,
        name="write_kv",
    )(runs.reshape(-1), new, new, kv)
    return written


def _merge(runs: Any, left: Any, right: Any, old: Any, out: Any) -> None:
    u, count = pl.program_id(0), pl.num_programs(0)
    _, parts, kv_heads, size, dim = out.shape
    shift = lax.rem(runs[LEAD * count + u] + size, size)
    offsets = lax.broadcasted_iota(jnp.int32, (size, dim), 0)
    taken = (runs[FROM * count + u] <= offsets) & (offsets < runs[TO * count + u])
    for which in range(parts):
        for head in range(kv_heads):
            both = jnp.concatenate([left[which, head], right[which, head]]).astype(jnp.float32)
            new = pltpu.roll(both, lax.rem(2 * size - shift, 2 * size), 0)[:size]  # rolls 32-bit numbers alone
            merged = jnp.where(taken, new, old[0, which, head].astype(jnp.float32))
            out[0, which, head] = merged.astype(out.dtype)
