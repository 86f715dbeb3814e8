"""Paged attention and the writing of K and V by quintet._cpu: each result in one order, whatever the batch."""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quintet.interface.types import INT4, AttentionSpec, Batch, Group, StepContext
from quintet.ops.attention import (
    attention,
    biased_attention,
    page_shape,
    paged_attention,
    row_width,
    write_kv,
)
from quintet.ops.distance_attention import disentangled_attention
from quintet.ops.sparse.blocks import block_sparse_attention
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, missing

SERVED = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2", INT4: "int4"}


def probe() -> str | None:
    """One token that sees only itself: attention gives its V back."""
    if (why := missing("WholeAttention")) is not None:
        return why
    if "of_queries" not in str(extension().WholeAttention.__call__.__doc__):
        return "the compiled extension is older than this provider; build it again with `make`"
    spec = AttentionSpec(1, 1, 8, 1.0, torch.float32, 16)
    k, v, kv = torch.ones(1, 1, 8), torch.arange(8.0).reshape(1, 1, 8), torch.zeros(2, 2, 1, 16, 8)
    none, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    group = Group(16 * one, one[None], one)
    context = StepContext(Batch(none, none, none, torch.cat([none, one]), none, (group,)), group)
    out = _paged_attention(k, _write_kv(kv, k, v, context), context, spec, None)
    return None if torch.equal(out, v) else f"attention to one token gave {out.tolist()}, not its values"


@write_kv.provide("native", probe)
def _write_kv(kv: Tensor, k: Tensor, v: Tensor | None, context: StepContext) -> Tensor:
    """Writes in place."""
    pages, sides, heads, size, width = kv.shape
    if not kv.is_contiguous():
        raise ValueError("the cache is not contiguous")
    k = _rows(k, k.dtype if kv.dtype in QUANTIZED else kv.dtype)
    v = None if v is None else _rows(v, k.dtype)
    slots, bytes_ = context.group.slot_mapping, k.element_size()
    if v is not None and k.shape != v.shape or sides != 1 + (v is not None) or _width(k, kv) != width:
        raise ValueError(f"k {tuple(k.shape)}, v {v is None or tuple(v.shape)} do not fit a cache of {tuple(kv.shape)}")
    if slots.shape[0] != k.shape[0] or k.shape[1] != heads:
        raise ValueError(f"k {tuple(k.shape)} and {len(slots)} slots do not fit a cache of {tuple(kv.shape)}")
    extension().store_kv(
        kv.data_ptr(), k.data_ptr(), 0 if v is None else v.data_ptr(), k.stride(0) * bytes_,
        0 if v is None else v.stride(0) * bytes_, _address(slots), k.shape[0], pages, heads, size, k.shape[2],
        *_type_codes(k.dtype, kv.dtype),
    )  # fmt: skip
    return kv


@paged_attention.provide("native", probe)
def _paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    if kv.dtype != spec.cache_dtype or not kv.is_contiguous():
        raise ValueError(f"the cache is {kv.dtype}, contiguous: {kv.is_contiguous()}, and must be {spec.cache_dtype}")
    if q.shape[1:] != (spec.heads, spec.head_dim) or kv.shape[1:] != page_shape(spec):
        raise ValueError(f"q {tuple(q.shape)} and a cache of {tuple(kv.shape)} do not fit {spec}")
    q = _rows(q, q.dtype)
    out = empty((*q.shape[:2], spec.value_dim), q.dtype)
    batch, group = context
    table, starts = group.block_table, batch.query_start_loc
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _layer(spec, q.dtype)(
        out.data_ptr(), q.data_ptr(), q.stride(0), kv.data_ptr(), kv.shape[0], _address(batch.positions),
        _address(starts), _address(group.seq_lens), _address(table), q.shape[0], table.shape[0], table.shape[1],
        0 if sinks is None else sinks.data_ptr(), 0 if spec.alibi is None else _slopes(spec.alibi).data_ptr(),
    )  # fmt: skip
    return out


def probe_blocks() -> str | None:
    """The paged kernel, with tables of each KV head."""
    if (why := probe()) is not None:
        return why
    known = "tables" in str(extension().PagedAttention.__call__.__doc__)
    return None if known else "the compiled extension is older than this provider; build it again with `make`"


@block_sparse_attention.provide("native", probe_blocks)
def _block_sparse_attention(q: Tensor, kv: Tensor, chosen: Tensor, context: StepContext, spec: AttentionSpec) -> Tensor:
    """Each token is a request of the paged kernel, and its blocks' pages are its tables. Blocks that are no whole
    pages, and KV heads that see different numbers of places, are left to torch."""
    (tokens, groups, count), block, own = chosen.shape, spec.chosen_block, context.batch.positions
    each = block // spec.page_size
    known = (chosen >= 0).sum(-1)
    last = chosen.gather(-1, (known - 1).clamp(min=0)[..., None])[..., 0]
    lengths = (known - 1) * block + (own[:, None] + 1 - last * block).clamp(max=block)  # [T, G]
    starts = torch.arange(tokens + 1, dtype=torch.int32).clamp_(max=int(context.batch.query_start_loc[-1]))
    if block % spec.page_size or (lengths != lengths[:, :1]).any() or (lengths[: int(starts[-1])] < 1).any():
        other: Tensor = block_sparse_attention.providers["torch"](q, kv, chosen, context, spec)
        return other
    if kv.shape[1:] != page_shape(spec) or kv.dtype != spec.cache_dtype or not kv.is_contiguous():
        raise ValueError(f"a cache of {tuple(kv.shape)} {kv.dtype} does not fit {spec}")
    rows = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq).long()  # [T, N]
    places = (chosen.long()[..., None] * each + torch.arange(each)).reshape(tokens, -1).clamp_(0, rows.shape[1] - 1)
    tables = rows.gather(1, places).to(torch.int32)  # [T, G count each]; what is behind `lengths` is not read
    q, lengths = _rows(q, q.dtype), lengths[:, 0].to(torch.int32).contiguous()
    out, positions = empty(q.shape, q.dtype), lengths - 1
    _layer(spec, q.dtype)(
        out.data_ptr(), q.data_ptr(), q.stride(0), kv.data_ptr(), kv.shape[0], _address(positions), _address(starts),
        _address(lengths), _address(tables), tokens, tokens, count * each, 0, 0, groups,
    )  # fmt: skip
    return out


@attention.provide("native", probe)
def _attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    return _step_attention(q, k, v, batch, spec, sinks)


@biased_attention.provide("native", probe)
def _biased_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec, bias: Tensor) -> Tensor:
    if bias.dtype != torch.float32 or bias.shape[0] != spec.heads or bias.shape[1] % 2 == 0:
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, not float32 [{spec.heads}, an odd number]")
    bias = bias.contiguous()
    return _step_attention(q, k, v, batch, spec, None, (bias.data_ptr(), bias.shape[1] // 2))


@disentangled_attention.provide("native", probe)
def _disentangled_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    spec: AttentionSpec,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    columns: Tensor,
) -> Tensor:
    given = [each for each in (of_queries, of_keys) if each is not None]
    if not given:
        return _step_attention(q, k, v, batch, spec, None)
    wanted = (*q.shape[:2], given[0].shape[2])
    if any(each.shape != wanted or each.dtype != q.dtype or not each.is_contiguous() for each in given):
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in given)
        raise ValueError(f"products of distances are {shapes}, not contiguous {wanted} {q.dtype}")
    addresses = [0 if each is None else each.data_ptr() for each in (of_queries, of_keys)]
    distances = (0, columns.shape[0] // 2, *addresses, _address(columns), wanted[2])
    return _step_attention(q, k, v, batch, spec, None, distances)


def _step_attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    spec: AttentionSpec,
    sinks: Tensor | None,
    more: tuple[int, ...] = (0, 0),
) -> Tensor:
    """`more`: the kernel's arguments from `biases` on."""
    kept = spec.kv_heads, spec.head_dim
    if q.shape[1:] != (spec.heads, spec.head_dim) or k.shape != v.shape or k.shape[1:] != kept:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit {spec}")
    q, k, v = (_rows(each, q.dtype) for each in (q, k, v))
    out = empty(tuple(q.shape), q.dtype)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _whole_layer(spec, q.dtype)(
        out.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        _address(batch.query_start_loc),
        q.shape[0],
        batch.query_start_loc.shape[0] - 1,
        0 if sinks is None else sinks.data_ptr(),
        0 if spec.alibi is None else _slopes(spec.alibi).data_ptr(),
        *more,
    )
    return out


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, heads, D] with each token's heads side by side; tokens may stand apart, as in the slices of one product."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() or x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _width(x: Tensor, kv: Tensor) -> int:
    return row_width(x.shape[2], kv.dtype)


def _type_codes(dtype: torch.dtype, cached: torch.dtype) -> tuple[int, bool, str]:
    """A type and the cache's, as the kernels name them: bits, whether it is bfloat16, and what the cache holds."""
    if dtype not in SERVED:
        raise ValueError(f"attention is computed in {', '.join(map(str, SERVED))}, not in {dtype}")
    if cached != dtype and cached not in QUANTIZED:
        raise ValueError(f"a cache for {dtype} is of that type, or of {', '.join(map(str, QUANTIZED))}, not {cached}")
    return 8 * dtype.itemsize, dtype == torch.bfloat16, QUANTIZED.get(cached, "same")


def _address(x: Tensor) -> int:
    if x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(f"a batch's arrays are contiguous int32, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


@functools.lru_cache(maxsize=256)
def _layer(spec: AttentionSpec, dtype: torch.dtype) -> Callable[..., None]:
    layer: Callable[..., None] = extension().PagedAttention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.shared, spec.page_size, spec.window or 0, spec.chunk or 0,
        spec.causal, spec.scale, spec.softcap or 0.0, *_type_codes(dtype, spec.cache_dtype),
    )  # fmt: skip
    return layer


@functools.lru_cache(maxsize=256)
def _whole_layer(spec: AttentionSpec, dtype: torch.dtype) -> Callable[..., None]:
    bits, brain, _ = _type_codes(dtype, dtype)
    layer: Callable[..., None] = extension().WholeAttention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.window or 0, spec.chunk or 0, spec.causal, spec.scale,
        spec.softcap or 0.0, bits, brain,
    )  # fmt: skip
    return layer


@functools.cache
def _slopes(alibi: tuple[float, ...]) -> Tensor:
    """Kept for good: a recorded step holds its address."""
    return torch.from_numpy(np.array(alibi, np.float32))
