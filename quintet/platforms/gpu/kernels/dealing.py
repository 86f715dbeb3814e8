"""Places of a token's experts on this rank (EPLB), and counts of tokens per expert. Not verified on a GPU yet.

The kernels of moe.py take the results as they are: they skip an id of -1, which stands for an expert on another rank.
Each op is one launch and asks the host nothing, so that a step with it can be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.ops.moe import HASHED_FEATURES
from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 256  # ids of a program. Untuned
FIRST = tl.constexpr(HASHED_FEATURES)  # numbers of a token that choose between copies


@triton.jit(do_not_specialize=["count", "k", "num", "columns", "row", "width"])
def _local(out, x, ids, places, count, k, num, columns, row, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    expert = tl.load(ids + at, mask=there, other=-1)
    known = (expert >= 0) & (expert < num)
    token = (at // k).to(tl.int64)
    bits = tl.zeros((BLOCK,), tl.int64)
    for place in tl.static_range(FIRST):
        number = tl.load(x + token * row + place, mask=there & (place < width), other=0.0).to(tl.float32)
        bits += number.to(tl.int32, bitcast=True).to(tl.int64)
    column = ((((bits >> 8) & 0xFFFFFF) * 0x9E3779B1) >> 20) % columns
    found = tl.load(places + expert.to(tl.int64) * columns + column, mask=known, other=-1)
    tl.store(out + at, found, mask=there)


def local(x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    """See the specification; x dense along its rows, ids and places dense int32."""
    out, (num, columns) = torch.empty_like(ids), places.shape
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), BLOCK),)
        sizes = (ids.numel(), ids.shape[1], num, columns, x.stride(0), x.shape[1])
        _local[grid](out, x, ids, places, *sizes, BLOCK=BLOCK)
    return out


@triton.jit(do_not_specialize=["count", "num"])
def _count(loads, ids, count, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + at, mask=at < count, other=-1)
    # sums of integers, which are the same in any order, and wrap as the specification's do
    tl.atomic_add(loads + expert, 1, mask=(expert >= 0) & (expert < num), sem="relaxed")


def count(ids: Tensor, loads: Tensor) -> Tensor:
    """See the specification; both dense int32."""
    if ids.numel():
        _count[(triton.cdiv(ids.numel(), BLOCK),)](loads, ids, ids.numel(), len(loads), BLOCK=BLOCK)
    return loads


def variants() -> list[Variant]:
    """Variants of each type of token, and of the counting."""
    sizes = dict.fromkeys(("count", "k", "num", "columns", "row", "width"), "i32")
    tables = dict.fromkeys(("out", "ids", "places"), "*i32")
    found = [
        Variant(f"local experts {kind}", _local, {**tables, "x": t, **sizes}, {"BLOCK": BLOCK})
        for kind, t in (("bf16", "*bf16"), ("fp16", "*fp16"), ("fp32", "*fp32"))
    ]
    numbers = {"loads": "*i32", "ids": "*i32", "count": "i32", "num": "i32"}
    return [*found, Variant("count experts", _count, numbers, {"BLOCK": BLOCK})]
