"""RMS norm, plain and joined with the residual.

A program owns whole rows; it reads them once if its registers hold them. Which lanes add up which features depends on
the width alone, so a row has the same bits in every batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

WIDEST = 8192  # features of a row that is read once: 16 in each lane of 16 warps. Half as many again would spill
PIECE = 4096  # features at a time of a wider one. Untuned
PER_PROGRAM = 2048  # features; shorter rows share a program, so that its loads fill a few cache lines. Untuned
PER_LANE = 16  # features that a lane holds. Untuned
MOST_WARPS = 16  # of 64 lanes on some GPUs, where 1024 threads are all that a program may have


class RowStrides(NamedTuple):
    """Rows of a tensor with a dense last axis: row r starts at r // inner * outer_step + r % inner * inner_step."""

    at: Tensor
    number: int
    inner: int
    outer_step: int
    inner_step: int


def rows_of(x: Tensor) -> RowStrides:
    """Copies only if the last axis is not dense, or four axes and more have holes."""
    if x.stride(-1) != 1 or (x.dim() > 3 and not x.is_contiguous()):
        x = x.contiguous()
    if x.dim() == 3:
        return RowStrides(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
    width = x.shape[-1]
    return RowStrides(x, x.numel() // max(width, 1), 1, x.stride(0) if x.dim() == 2 else width, 0)


@triton.jit
def _summed(x, residual, feature, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Some features of one row, plus the residual's, rounded."""
    y = tl.load(x + feature, mask=feature < WIDTH, other=0.0)
    if ADD:
        y = (y.to(tl.float32) + tl.load(residual + feature, mask=feature < WIDTH, other=0.0).to(tl.float32)).to(y.dtype)
    return y


@triton.jit
def _weighted(z, w, offset, SHIFTED: tl.constexpr, dtype: tl.constexpr):
    """Normalized features times the weight, rounded as the specification rounds."""
    if SHIFTED:
        return (z * (offset + w)).to(dtype)
    else:
        return (z.to(dtype).to(tl.float32) * w).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, total, rows, inner, outer_step, inner_step, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (feature < WIDTH)
    dense = row * WIDTH + feature
    y = tl.load(x + row // inner * outer_step + row % inner * inner_step + feature, mask=there, other=0.0)
    if ADD:
        y = (y.to(tl.float32) + tl.load(residual + dense, mask=there, other=0.0).to(tl.float32)).to(y.dtype)
        tl.store(total + dense, y, mask=there)
    w = tl.load(weight + feature, mask=feature < WIDTH, other=0.0).to(tl.float32)
    z = y.to(tl.float32)
    z = z * tl.rsqrt(tl.sum(z * z, 1) / WIDTH + eps)[:, None]
    tl.store(out + dense, _weighted(z, w, offset, SHIFTED, y.dtype), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _long_rms_norm(
    x, residual, weight, out, total, rows, inner, outer_step, inner_step, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row // inner * outer_step + row % inner * inner_step
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        y = _summed(x, residual + row * WIDTH, feature, WIDTH, ADD)
        if ADD:
            tl.store(total + row * WIDTH + feature, y, mask=feature < WIDTH)
        squares += y.to(tl.float32) * y.to(tl.float32)
    root = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for start in range(0, WIDTH, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        y = _summed(x, residual + row * WIDTH, feature, WIDTH, ADD)
        w = tl.load(weight + feature, mask=feature < WIDTH, other=0.0).to(tl.float32)
        z = _weighted(y.to(tl.float32) * root, w, offset, SHIFTED, y.dtype)
        tl.store(out + row * WIDTH + feature, z, mask=feature < WIDTH)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """x [..., D] and a dense residual like it -> (norm, x + residual); without a residual, the second is x itself."""
    width = x.shape[-1]
    rows = rows_of(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    args = (rows.at, out if residual is None else residual, weight, out, total, *rows[1:], eps, offset)
    given = {"WIDTH": width, "ADD": residual is not None, "SHIFTED": offset != 0}
    if width > WIDEST:
        _long_rms_norm[(rows.number,)](*args, BLOCK=PIECE, num_warps=MOST_WARPS // 2, **given)
    else:
        block, together, warps = _shape_of(width)
        _rms_norm[(triton.cdiv(rows.number, together),)](*args, BLOCK=block, ROWS=together, num_warps=warps, **given)
    return out, total


def _shape_of(width: int) -> tuple[int, int, int]:
    """Features and rows of a program, and its warps."""
    block = triton.next_power_of_2(width)
    together = max(1, PER_PROGRAM // block)
    return block, together, min(MOST_WARPS, max(1, block * together // (32 * PER_LANE)))


def variants() -> list[Variant]:
    """Hidden sizes of models, and a head's."""
    pointers = ("x", "residual", "weight", "out", "total")
    numbers: dict[str, str] = {"rows": "i32", "inner": "i32", "outer_step": "i32:16", "inner_step": "i32:16"}
    numbers |= {"eps": "fp32", "offset": "fp32"}
    found = []
    for kind in ("bf16", "fp16", "fp32"):
        signature = dict.fromkeys(pointers, f"*{kind}") | numbers
        for width, add, shifted in ((128, False, True), (4096, True, False), (5120, True, True), (8192, True, False)):
            block, together, warps = _shape_of(width)
            constants = {"WIDTH": width, "BLOCK": block, "ROWS": together, "ADD": add, "SHIFTED": shifted}
            found.append(Variant(f"rms_norm {kind} {width}", _rms_norm, signature, constants, warps))
        constants = {"WIDTH": 16384, "BLOCK": PIECE, "ADD": True, "SHIFTED": True}
        found.append(Variant(f"rms_norm {kind} 16384", _long_rms_norm, signature, constants, MOST_WARPS // 2))
    return found
