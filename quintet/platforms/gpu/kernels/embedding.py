"""The look-up of rows, whole tables and parts of one: a copy in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 1024  # numbers of a row that a program copies. Untuned


@triton.jit
def _embedding(ids, table, out, first, count, step, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64) - first
    there = tl.where((row >= 0) & (row < count), width, 0)
    tl.store(out + token * width + i, tl.load(table + row * step + i, mask=i < there, other=0.0), mask=i < width)


def embedding(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of table [V, D], dense along D, for ids [T]: row 0 has the id `first`; ids outside give zeros."""
    tokens, (count, width) = ids.shape[0], table.shape
    out = torch.empty(tokens, width, dtype=table.dtype, device=table.device)
    grid = (tokens, triton.cdiv(width, BLOCK))
    _embedding[grid](ids, table, out, first, count, table.stride(0), width, BLOCK=BLOCK)
    return out


def variants() -> list[Variant]:
    """Variants of each type of number."""
    numbers = {"first": "i32", "count": "i32", "step": "i32:16", "width": "i32:16"}
    return [
        Variant(f"embedding {kind}", _embedding, {"ids": "*i32", "table": t, "out": t, **numbers}, {"BLOCK": BLOCK})
        for kind, t in (("bf16", "*bf16"), ("fp16", "*fp16"), ("fp32", "*fp32"))
    ]
