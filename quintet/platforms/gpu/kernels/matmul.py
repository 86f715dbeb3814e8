"""Shared parts of the matmul kernels: the order of tiles, splits along the inputs, and how a result is finished.

Not verified on a GPU yet.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

TYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SPAN = tl.constexpr(8)  # tiles of outputs that go through all tokens together: their weights stay in the cache
ADDED = 1024  # outputs that one program of add_splits() adds up


@triton.jit
def tile_of(number, wide, tall):
    """-> (tile of outputs, tile of tokens) of so many: SPAN of the former side by side, for each of the latter."""
    span = number // (SPAN * tall)
    width = tl.minimum(wide - span * SPAN, SPAN)
    inside = number % (SPAN * tall)
    return span * SPAN + inside % width, inside // width


@triton.jit
def finish(sums, rows, columns, own, scales, bias, own_row, scale_row):
    """sums [BM, BN] in the order of the specification: by the token's scale, by the output's, plus the bias."""
    y = sums.to(tl.float32)
    if own is not None:
        y = y * tl.load(own + rows * own_row)[:, None]
    if scales is not None:
        y = y * tl.load(scales + columns * scale_row).to(tl.float32)[None, :]
    if bias is not None:
        y = y + tl.load(bias + columns).to(tl.float32)[None, :]
    return y


@triton.jit(do_not_specialize=["tokens", "splits"])
def add_splits(out, sums, own, scales, bias, tokens, outputs, splits, own_row, scale_row, BN: tl.constexpr):
    """sums [S, tokens, outputs], first to last -> out [tokens, outputs]."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    there = columns < outputs
    total = tl.load(sums + row * outputs + columns, mask=there, other=0)
    for split in range(1, splits):
        total += tl.load(sums + (split * tokens + row) * outputs + columns, mask=there, other=0)
    rows = row + tl.arange(0, 1)
    inside = tl.minimum(columns, outputs - 1)
    y = finish(total[None, :], rows, inside, own, scales, bias, own_row, scale_row)
    at = out + rows[:, None] * outputs + columns[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=there[None, :])


def added(out: Tensor, sums: Tensor, own: Tensor | None, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    """out [T, N] of the sums [S, T, N] of S splits."""
    splits, tokens, outputs = sums.shape
    own_row, scale_row = (0 if each is None else each.stride(0) for each in (own, scales))
    grid = triton.cdiv(outputs, ADDED), tokens
    add_splits[grid](out, sums, own, scales, bias, tokens, outputs, splits, own_row, scale_row, BN=ADDED)
    return out


def computed(dtype: torch.dtype, device: torch.device) -> Any:
    """The type that a product's factors have; Triton's interpreter, on the host, knows no arithmetic in bfloat16."""
    return tl.float32 if device.type == "cpu" and dtype == torch.bfloat16 else TYPES[dtype]


@functools.cache
def units(device: torch.device) -> int:
    """Processors of a device that each run some programs at a time; the interpreter is one."""
    if device.type == "cpu":
        return 1
    facts = getattr(torch, device.type).get_device_properties(device)
    return int(getattr(facts, "multi_processor_count", 0) or getattr(facts, "gpu_subslice_count", 0) or 64)


def variants() -> list[Variant]:
    """The sums of products in half precision, and of whole numbers."""
    found = []
    for dtype in ("bf16", "fp16"):
        for sums in ("fp32", "i32"):
            whole = sums == "i32"
            signature = {"out": f"*{dtype}", "sums": f"*{sums}", "outputs": "i32:16"}
            signature |= dict.fromkeys(("tokens", "splits", "own_row", "scale_row"), "i32")
            signature |= {"own": "*fp32", "scales": "*fp32"} if whole else {}
            fixed = {"bias": None, "BN": ADDED} | ({} if whole else {"own": None, "scales": None})
            found.append(Variant(f"add {sums} to {dtype}", add_splits, signature, fixed))
    return found
