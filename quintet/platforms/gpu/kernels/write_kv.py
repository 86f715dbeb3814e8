"""K and V of new tokens into pages of the cache, as quintet.ops.attention.to_cache_rows() has it.

Conversions are written out in bits: every device rounds alike, and none needs to know the types.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.attention_layer import E4M3, E4M3FNUZ, E5M2, FLOAT8, INT8, PLAIN
from quintet.platforms.gpu.kernels.attention_parts import E4M3 as E4M3_
from quintet.platforms.gpu.kernels.attention_parts import E4M3FNUZ as E4M3FNUZ_
from quintet.platforms.gpu.kernels.attention_parts import E5M2 as E5M2_
from quintet.platforms.gpu.kernels.attention_parts import INT8 as INT8_
from quintet.platforms.gpu.kernels.formats import rounded, to_eight
from quintet.platforms.gpu.kernels.variant import Variant

ELEMENTS = 2048  # of a program: 16 a thread, untuned
STORED = {
    torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e4m3fnuz: E4M3FNUZ, torch.float8_e5m2: E5M2,
}  # fmt: skip


@triton.jit
def scale_of(x, wanted, STORED: tl.constexpr):
    """Returns the int8 scale of each row of x [heads, numbers], or of a part of it; NaN if the row has one."""
    if STORED == INT8_:
        x = tl.where(wanted, x.to(tl.float32), 0.0)
        broken = tl.max((x != x).to(tl.int32), 1) > 0
        peak = tl.max(tl.abs(x), 1)
        return tl.where(broken, float("nan"), tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32)))
    else:
        return tl.zeros([x.shape[0]], tl.float32)


@triton.jit
def write_scale(scales, scale, rows, there, WIDTH: tl.constexpr, DIM: tl.constexpr, STORED: tl.constexpr):
    """Behind the numbers of these rows."""
    if STORED == INT8_:
        tl.store(scales + rows * (WIDTH // 4) + DIM // 4, scale, mask=there)


@triton.jit
def write_part(kv, x, scale, rows, wanted, columns, WIDTH: tl.constexpr, STORED: tl.constexpr):
    """x [heads, numbers] to these columns of these rows of the cache."""
    at = kv + rows[:, None] * WIDTH + columns[None, :]
    if STORED == INT8_:
        x = tl.where(wanted, x.to(tl.float32), 0.0)
        finite = scale < float("inf")
        usable = tl.where(finite & (scale > 0.0), scale, 1.0)
        steps = tl.div_rn(tl.where(finite[:, None], x, 0.0), tl.broadcast_to(usable[:, None], x.shape))
        steps = tl.minimum(tl.maximum(rounded(steps), -127.0), 127.0)
        tl.store(at, steps.to(tl.int8), mask=wanted)
    elif STORED == E4M3_:
        x = x.to(tl.float32)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80  # of -0 too, which this format has
        tl.store(at, tl.where(x == x, to_eight(x, 3, 7, 0x7E).to(tl.int32) | sign, 0x7F).to(tl.uint8), mask=wanted)
    elif STORED == E4M3FNUZ_:
        x = x.to(tl.float32)
        tl.store(at, tl.where(x == x, to_eight(x, 3, 8, 0x7F), 0x80).to(tl.uint8), mask=wanted)
    elif STORED == E5M2_:
        x = x.to(tl.float32)
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        tl.store(at, tl.where(x == x, to_eight(x, 2, 15, 0x7B).to(tl.int32) | sign, 0x7F).to(tl.uint8), mask=wanted)
    else:
        tl.store(at, x.to(kv.dtype.element_ty), mask=wanted)


@triton.jit
def write_whole(
    kv, scales, x, rows, wanted, there, columns, WIDTH: tl.constexpr, DIM: tl.constexpr, STORED: tl.constexpr
):
    """x [heads, BLOCK_D] to these rows of the cache."""
    scale = scale_of(x, wanted, STORED)
    write_part(kv, x, scale, rows, wanted, columns, WIDTH, STORED)
    write_scale(scales, scale, rows, there, WIDTH, DIM, STORED)


@triton.jit
def write_rows(
    kv, scales, k, v, slots, k_stride, v_stride,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    STORED: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (T, KV_HEADS / HEADS): a program writes K, and V of PARTS 2, of some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK_D)
    there = heads < KV_HEADS
    wanted = there[:, None] & (columns < DIM)[None, :]
    at = heads[:, None] * DIM + columns[None, :]
    new_k = tl.load(k + token * k_stride + at, mask=wanted, other=0.0)
    slot = tl.load(slots + token)
    rows = ((slot // PAGE_SIZE).to(tl.int64) * (PARTS * KV_HEADS) + heads) * PAGE_SIZE + slot % PAGE_SIZE
    write_whole(kv, scales, new_k, rows, wanted, there, columns, WIDTH, DIM, STORED)
    if PARTS == 2:
        new_v = tl.load(v + token * v_stride + at, mask=wanted, other=0.0)
        write_whole(kv, scales, new_v, rows + KV_HEADS * PAGE_SIZE, wanted, there, columns, WIDTH, DIM, STORED)


def launch(kv: Tensor, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
    """kv [P, 2, Hkv, page_size, row width], contiguous, or [P, 1, ...] without v; k and v [T, Hkv, D], each token's
    numbers side by side."""
    tokens, kv_heads, dim = k.shape
    constants = constants_of(kv, dim)
    v_stride = k.stride(0) if v is None else v.stride(0)
    write_rows[(tokens, triton.cdiv(kv_heads, constants["HEADS"]))](
        *seen(kv), k, v, slots, k.stride(0), v_stride, **constants, num_warps=4
    )


def seen(kv: Tensor) -> tuple[Tensor, Tensor | None]:
    """The cache as kernels take it, and its scales."""
    stored = STORED.get(kv.dtype, PLAIN)
    scales = kv.view(torch.float32) if stored == INT8 else None
    return kv.view(torch.uint8) if stored in (E4M3, E4M3FNUZ, E5M2) else kv, scales


def constants_of(kv: Tensor, dim: int) -> dict[str, int]:
    """For rows of `dim` numbers."""
    return _constants(kv.shape[2], dim, kv.shape[3], STORED.get(kv.dtype, PLAIN), kv.shape[1])


def _constants(kv_heads: int, dim: int, page_size: int, stored: int, parts: int = 2) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "BLOCK_D": block,
        "PAGE_SIZE": page_size,
        "WIDTH": dim + 4 * (stored == INT8),
        "STORED": stored,
        "PARTS": parts,
        "HEADS": min(triton.next_power_of_2(kv_heads), max(1, ELEMENTS // block)),
    }


def variants() -> list[Variant]:
    made = []
    for dtype, cache, stored in (
        ("bf16", "bf16", PLAIN),
        ("bf16", "i8", INT8),
        ("bf16", "u8", E4M3),
        ("bf16", "u8", E4M3FNUZ),
        ("bf16", "u8", E5M2),
    ):
        signature = {"kv": f"*{cache}", "scales": "*fp32", "k": f"*{dtype}", "v": f"*{dtype}", "slots": "*i32"}
        signature |= {"k_stride": "i32:16", "v_stride": "i32:16"}
        made.append(
            Variant(
                f"write_rows {dtype} to {FLOAT8.get(stored, cache)}",
                write_rows,
                signature,
                _constants(8, 128, 16, stored),
            )
        )
        alone = {name: kind for name, kind in signature.items() if name != "v"}
        constants = {**_constants(1, 576, 16, stored, parts=1), "v": None}
        made.append(Variant(f"write_rows {dtype} to {FLOAT8.get(stored, cache)}, V in K", write_rows, alone, constants))
    return made
