"""Paged attention and the writing of K and V by Triton kernels.

Not bit for bit what another provider gives. A request's decoded tokens are the same bits in every batch; a prompt's may
depend on how it is cut into chunks.
"""

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, Batch, Group, StepContext
from quintet.ops.attention import from_cache_rows, page_shape, paged_attention, row_width, to_cache_rows, write_kv
from quintet.platforms.gpu import library_checks as trials
from quintet.platforms.gpu.attention import single
from quintet.platforms.gpu.ops.probe import probing

if TYPE_CHECKING:
    from quintet.platforms.gpu.kernels.attention_layer import AttentionLaunch, AttentionLayer, DeviceLimits

SERVED = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
QUANTIZED = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
MAX_GROUP = 128  # query heads per KV head: rows of a tile
MAX_DIM = 512  # of V, and of K where it is no more
MAX_REST = 128  # of K beyond V, where V is the beginning of it


def reasons(spec: AttentionSpec) -> list[str]:
    """Returns all the reasons why these kernels cannot serve such a layer."""
    found = []
    if spec.dtype not in SERVED:
        found.append(f"it computes in {', '.join(map(str, SERVED))}, not in {spec.dtype}")
    if spec.cache_dtype != spec.dtype and spec.cache_dtype not in QUANTIZED:
        found.append(f"a cache is of the layer's type or of {', '.join(map(str, QUANTIZED))}, not {spec.cache_name}")
    if spec.cache_dtype == torch.int8 and spec.head_dim % 4:
        found.append(f"a float32 scale stands behind each int8 row: head_dim {spec.head_dim} must be a multiple of 4")
    if spec.value_dim > MAX_DIM:
        found.append(f"heads of {spec.value_dim} numbers are more than {MAX_DIM}, which no program could hold")
    if spec.head_dim - spec.value_dim > MAX_REST:
        found.append(f"K has {spec.head_dim - spec.value_dim} numbers beyond V, more than {MAX_REST}")
    if spec.heads // spec.kv_heads > MAX_GROUP:
        found.append(f"{spec.heads // spec.kv_heads} query heads per KV head are more than {MAX_GROUP}")
    if spec.source == "cross" and (spec.window is not None or spec.alibi is not None):
        found.append("a window and slopes are of tokens and keys of one sequence, not of two")
    return found


def trial(spec: AttentionSpec, device: torch.device) -> str | None:
    """Runs the kernels once as this very layer wants them, over random numbers on pages in no order: a prompt, the rest
    of it, then a token alone; against the specification. -> which of them failed, and how."""
    what = "writing K and V"
    try:
        most = trials.tokens_for(device)
        pages = -(-(most + 1) // spec.page_size)
        kv = torch.zeros(pages + 1, *page_shape(spec), dtype=torch.uint8, device=device)
        kv = kv.repeat_interleave(spec.cache_dtype.itemsize, -1).view(spec.cache_dtype)
        table = torch.arange(pages, 0, -1, dtype=torch.int32, device=device)
        k = trials.test_numbers(device, most + 1, spec.kv_heads, spec.head_dim).to(spec.dtype)
        v, q = k.flip(0), trials.queries(spec, device, most + 1)
        sinks, behind = trials.sinks_for(spec, device), most * 5 // 7
        for what, first, last in (
            ("a prompt", 0, behind), ("the rest of a prompt", behind, most), ("a token alone", most, most + 1),
        ):  # fmt: skip
            context, now = step(first, last, spec.page_size, device, table), slice(first, last)
            kv = _write_kv(kv, k[now], None if spec.shared else v[now], context)
            got = _paged_attention(q[now], kv, context, spec, sinks)
            if wrong := trials.differ_by_row(got, _specified(q[now], k[:last], v[:last], context, spec, sinks), what):
                return wrong
    except Exception as error:  # compilers and drivers fail in many ways; each is a reason not to serve
        lines = str(error).strip().splitlines()
        return f"{what} fails: {type(error).__name__}: {lines[0] if lines else 'no message'}"
    return None


def _specified(
    q: Tensor, k: Tensor, v: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """In float32, over K and V as a cache has them, on one page: some types have no indexing of their own."""
    kept = [
        from_cache_rows(to_cache_rows(each, spec.cache_dtype), spec.head_dim)
        for each in ((k,) if spec.shared else (k, v))
    ]
    kv = torch.stack(kept).transpose(1, 2).contiguous()[None]  # [1, 2 or 1, Hkv, tokens, D]
    group = context.group._replace(block_table=context.group.block_table[:, :1] * 0)
    of = replace(spec, dtype=torch.float32, kv_dtype=None, page_size=len(k))
    return trials.specified(q.float(), kv, context._replace(group=group), of, None if sinks is None else sinks.float())


def step(first: int, last: int, page_size: int, device: torch.device, pages: Tensor | None = None) -> StepContext:
    """Some positions of one request, on these pages or on page 1; planned as what they are."""
    own = torch.arange(first, last, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    pages = one if pages is None else pages
    plan = torch.empty(0, 1 if last - first == 1 else 2, 0, dtype=torch.int32, device=device)
    slots = torch.index_select(pages, 0, own // page_size) * page_size + own % page_size
    group = Group(slots, pages[None], one * last, (plan,))
    return StepContext(Batch(own, own, own * 0, torch.cat([one * 0, one * (last - first)]), one, (group,)), group)


def workspace(spec: AttentionSpec, requests: int, device: torch.device) -> int:
    """Bytes that one layer's attention takes beside its result in a step of so many requests."""
    from quintet.platforms.gpu.kernels import attention_split

    shapes = attention_split.workspace(_layer(spec, spec.sinks, limits(device)), requests)
    return sum(4 * math.prod(shape) for shape in shapes)


def _check(device: torch.device) -> str | None:
    """Two tokens of one request, then a third alone, over values that tell them apart."""
    spec = AttentionSpec(2, 1, 16, 0.25, torch.float32, 16)
    kv = torch.zeros(2, *page_shape(spec), device=device)
    k = torch.zeros(3, 1, 16, device=device)
    v = torch.arange(3.0, device=device)[:, None, None].expand(3, 1, 16).contiguous()
    for first, last in ((0, 2), (2, 3)):
        own, context = torch.arange(first, last, device=device), step(first, last, 16, device)
        context = context._replace(group=context.group._replace(plan=()))  # a caller of an op need not have planned
        kv = _write_kv(kv, k[first:last], v[first:last], context)
        out = _paged_attention(torch.ones(last - first, 2, 16, device=device), kv, context, spec, None)
        want = own[:, None, None].float() / 2  # the mean of the values up to a token's own
        if not torch.allclose(out, want.expand_as(out)):
            return f"attention over equal keys gave {out[:, 0, 0].tolist()}, not the means {want.flatten().tolist()}"
    return None


@write_kv.provide("triton", probing(_check))
def _write_kv(kv: Tensor, k: Tensor, v: Tensor | None, context: StepContext) -> Tensor:
    """Writes in place."""
    from quintet.platforms.gpu.kernels import write_kv as kernel

    check_written(kv, k, v)
    if k.shape[0]:
        kernel.launch(kv, _rows(k), None if v is None else _rows(v), context.group.slot_mapping)
    return kv


def check_written(kv: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Raises ValueError if k and v cannot be written to such a cache."""
    parts, heads, _, width = kv.shape[1:]
    fits = k.shape[1] == heads and row_width(k.shape[2], kv.dtype) == width and parts == (1 if v is None else 2)
    if not fits or (v is not None and k.shape != v.shape) or not kv.is_contiguous():
        given = None if v is None else tuple(v.shape)
        raise ValueError(f"k {tuple(k.shape)}, v {given} do not fit a contiguous cache {tuple(kv.shape)}")
    if kv.dtype not in (*SERVED, *QUANTIZED) or (kv.dtype == torch.int8 and k.shape[2] % 4):
        raise ValueError(f"a cache of {kv.dtype} with head_dim {k.shape[2]} is not written by Triton kernels")


@paged_attention.provide("triton", probing(_check))
def _paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    _check_fits(q, kv, spec)
    return attend(q, kv, context, spec, sinks, limits(q.device))


def attend_batch_invariant(
    q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """The op, every token by the kernel for prompts: no bit depends on how a prompt is cut, or on the batch."""
    from quintet.platforms.gpu.kernels import attention

    _check_fits(q, kv, spec)
    out = torch.zeros((*q.shape[:2], spec.value_dim), dtype=q.dtype, device=q.device)  # of padding
    if q.shape[0]:
        attention.launch(_call(out, q, kv, context, spec, sinks, limits(q.device)), least=1)
    return out


def _check_fits(q: Tensor, kv: Tensor, spec: AttentionSpec) -> None:
    if kv.dtype != spec.cache_dtype or not kv.is_contiguous():
        raise ValueError(f"the cache is {kv.dtype}, contiguous: {kv.is_contiguous()}, and must be {spec.cache_dtype}")
    if q.shape[1:] != (spec.heads, spec.head_dim) or kv.shape[1:] != page_shape(spec) or q.dtype != spec.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and a cache of {tuple(kv.shape)} do not fit {spec}")


def attend(
    q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None, limits: "DeviceLimits"
) -> Tensor:
    """Runs the op, with the kernels as they are made for a device of these limits."""
    from quintet.platforms.gpu.kernels import attention, attention_split

    out = torch.empty((*q.shape[:2], spec.value_dim), dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    call = _call(out, q, kv, context, spec, sinks, limits)
    if not single(context.group):
        attention.launch(call)
    shapes = attention_split.needed(call)
    attention_split.launch(call, *(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes))
    return out


def _call(  # noqa: PLR0913  # the op's arguments
    out: Tensor,
    q: Tensor,
    kv: Tensor,
    context: StepContext,
    spec: AttentionSpec,
    sinks: Tensor | None,
    limits: "DeviceLimits",
) -> "AttentionLaunch":
    from quintet.platforms.gpu.kernels.attention_layer import AttentionLaunch

    slopes = None if spec.alibi is None else _slopes(spec.alibi, q.device)
    seen, scales = _seen(kv, limits)
    layer = _layer(spec, sinks is not None, limits)
    return AttentionLaunch(layer, limits, context, out, _rows(q), seen, scales, sinks, slopes, spec.scale, spec.softcap)


def _rows(x: Tensor) -> Tensor:
    """[T, heads, D] with each token's heads side by side; tokens may stand apart, as in the slices of one product."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _seen(kv: Tensor, limits: "DeviceLimits") -> tuple[Tensor, Tensor | None]:
    """The cache as the kernels take it, and its scales."""
    if kv.dtype == torch.int8:
        return kv, kv.view(torch.float32)
    return (kv if kv.dtype in SERVED or _native(kv.dtype, limits) else kv.view(torch.uint8)), None


def _native(dtype: torch.dtype, limits: "DeviceLimits") -> bool:
    """True if Triton converts that 8-bit type here."""
    return {torch.float8_e4m3fn: limits.e4m3, torch.float8_e4m3fnuz: limits.e4m3fnuz}.get(dtype, False)


@functools.lru_cache(maxsize=256)
def _layer(spec: AttentionSpec, sinks: bool, limits: "DeviceLimits") -> "AttentionLayer":
    from quintet.platforms.gpu.kernels.attention_layer import PLAIN, AttentionLayer
    from quintet.platforms.gpu.kernels.write_kv import STORED

    native = _native(spec.cache_dtype, limits)
    stored = PLAIN if native else STORED.get(spec.cache_dtype, PLAIN)
    return AttentionLayer(
        spec.heads, spec.kv_heads, spec.head_dim, spec.page_size, SERVED[spec.dtype], stored, spec.window or 0,
        spec.softcap is not None, spec.alibi is not None, sinks, not limits.bf16,
        native and spec.cache_dtype == torch.float8_e4m3fn, spec.shared, spec.causal, spec.chunk or 0,
        native and spec.cache_dtype == torch.float8_e4m3fnuz,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _slopes(alibi: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept for good: a captured step holds its address."""
    return torch.tensor(alibi, dtype=torch.float32, device=device)


@functools.cache
def limits(device: torch.device) -> "DeviceLimits":
    """Returns the limits of a program on this device, from its driver and Triton."""
    from quintet.platforms.gpu.kernels.attention_layer import DeviceLimits
    from quintet.platforms.gpu.kernels.chips import chip_limits_for

    if device.type == "cpu":  # interpreted
        return DeviceLimits(bf16=False, cut=chip_limits_for(device))
    import triton
    from triton.compiler import make_backend

    driver = triton.runtime.driver.active
    facts = driver.utils.get_device_properties(
        device.index if device.index is not None else driver.get_current_device()
    )
    known = make_backend(driver.get_current_target()).parse_options({}).supported_fp8_dtypes
    e4m3, e4m3fnuz = ("fp8" + name in known for name in ("e4nv", "e4b8"))
    return DeviceLimits(
        facts["max_shared_mem"], facts["multiprocessor_count"], e4m3, e4m3fnuz=e4m3fnuz, cut=chip_limits_for(device)
    )
