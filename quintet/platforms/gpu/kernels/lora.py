"""Low-rank adapters beside a product: x by the rows of A into float32, then these by the rows of B onto y.

Not verified on a GPU yet. Tokens choose their adapter in the kernels: there is a program for each block of tokens and
each adapter, and it ends at once where no token of the block has that adapter. Blocks have one size, and the splits of
the inputs are settled by the weight's shape: a token's result does not depend on the other tokens, to the bit.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.chips import chip_limits_for
from quintet.platforms.gpu.kernels.matmul import TYPES, computed
from quintet.platforms.gpu.kernels.variant import Variant

# Untuned guesses. Few tokens wait for memory: A is read by as many programs as there are splits of 512 inputs.
TOKENS = 16  # of a block: the fewest that tensor cores multiply
RANK = 32  # rows of an adapter that a program takes at a time: with 64, RDNA spills
LEAST_RANK = 16  # the fewest that tensor cores multiply
STEP = 128  # inputs of a step; half as many in float32
SPLIT = 512  # inputs of a split
MOST_SPLITS = 16
COLUMNS = 64  # outputs of a program

Columns = tuple[tuple[int, int], ...]


@triton.jit(do_not_specialize=["tokens", "first", "ranks_row", "share"])
def shrink(
    low, x, lora_a, ranks, slots, tokens, inputs, parts, max_rank, first, ranks_row, share, x_row,
    COMPUTE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] by lora_a [S, P, R, K] of each token's adapter -> low [splits, tokens, P, R], the sums of stretches
    of `share` steps. What is beyond an adapter's rows, and rows of tokens without one, are left as they are."""
    adapter = tl.program_id(2)
    blocks = tl.cdiv(max_rank, BR)
    part, block = tl.program_id(1) % parts, tl.program_id(1) // parts
    split, block = block // blocks, block % blocks
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    mine = tl.load(slots + rows, mask=rows < tokens, other=0) == adapter + 1
    rank = tl.load(ranks + adapter * ranks_row + first + part)
    if (tl.max(mine.to(tl.int32), 0) > 0) & (block * BR < rank):
        r = block * BR + tl.arange(0, BR)
        m = tl.minimum(rows, tokens - 1).to(tl.int64)
        at_x = x + m[:, None] * x_row
        at_a = lora_a + ((adapter * parts + part).to(tl.int64) * max_rank + r)[None, :] * inputs
        sums = tl.zeros((BM, BR), tl.float32)
        for step in range(split * share, tl.minimum(split * share + share, tl.cdiv(inputs, BK))):
            k = step * BK + tl.arange(0, BK)
            used = (r < rank)[None, :]
            if EVEN:
                cut = tl.load(at_x + k[None, :], mask=mine[:, None], other=0.0)
            else:
                cut = tl.load(at_x + k[None, :], mask=mine[:, None] & (k < inputs)[None, :], other=0.0)
                used = used & (k < inputs)[:, None]
            weights = tl.load(at_a + k[:, None], mask=used, other=0.0)
            sums = tl.dot(cut.to(COMPUTE), weights.to(COMPUTE), sums, input_precision="ieee")
        at = low + ((split * tokens + m) * parts + part)[:, None] * max_rank + r[None, :]
        tl.store(at, sums, mask=mine[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["tokens", "first", "ranks_row", "splits"])
def expand(
    y, low, lora_b, ranks, slots, stretches, tokens, outputs, parts, max_rank, first, ranks_row, splits, y_row,
    BM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds low, by lora_b [S, R, N] of each token's adapter, to y [tokens, N]. `stretches` [blocks, 3]: the part that a
    block of columns belongs to, its first column, and the end of the stretch."""
    adapter = tl.program_id(2)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    mine = tl.load(slots + rows, mask=rows < tokens, other=0) == adapter + 1
    at_stretch = stretches + tl.program_id(1) * 3
    part = tl.load(at_stretch)
    rank = tl.load(ranks + adapter * ranks_row + first + part)
    if (tl.max(mine.to(tl.int32), 0) > 0) & (rank > 0):
        columns = tl.load(at_stretch + 1) + tl.arange(0, BN)
        there = columns < tl.load(at_stretch + 2)
        m = tl.minimum(rows, tokens - 1).to(tl.int64)
        at_y = y + m[:, None] * y_row + columns[None, :]
        sums = tl.load(at_y, mask=mine[:, None] & there[None, :], other=0.0).to(tl.float32)
        for start in range(0, rank, BR):
            r = start + tl.arange(0, BR)
            kept = mine[:, None] & (r < rank)[None, :]
            at_low = low + (m * parts + part)[:, None] * max_rank + r[None, :]
            rows_of_x = tl.load(at_low, mask=kept, other=0.0)
            for _ in range(1, splits):
                at_low += tokens * parts * max_rank
                rows_of_x += tl.load(at_low, mask=kept, other=0.0)
            at_b = lora_b + (adapter.to(tl.int64) * max_rank + r)[:, None] * outputs + columns[None, :]
            weights = tl.load(at_b, mask=(r < rank)[:, None] & there[None, :], other=0.0)
            sums = tl.dot(rows_of_x, weights.to(tl.float32), sums, input_precision="ieee")
        tl.store(at_y, sums.to(y.dtype.element_ty), mask=mine[:, None] & there[None, :])


def add_lora(
    y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, slots: Tensor, first: int, columns: Columns
) -> Tensor:
    """See the specification; y is overwritten. Rows of x and y are contiguous, all others dense."""
    adapters, parts, max_rank, inputs = lora_a.shape
    tokens, outputs = y.shape
    if not tokens:
        return y
    stretches = stretches_on(columns, y.device)
    compute, block = computed(x.dtype, x.device), rank_block(max_rank)
    step = step_of(compute)
    share = share_of(inputs, step)
    splits = triton.cdiv(triton.cdiv(inputs, step), share)
    low = torch.empty((splits, tokens, parts, max_rank), dtype=torch.float32, device=x.device)
    blocks, options = triton.cdiv(tokens, TOKENS), dict(chip_limits_for(x.device).options)
    shrink[blocks, parts * triton.cdiv(max_rank, block) * splits, adapters](
        low, x, lora_a, ranks, slots, tokens, inputs, parts, max_rank, first, ranks.stride(0), share, x.stride(0),
        COMPUTE=compute, EVEN=inputs % step == 0, BM=TOKENS, BR=block, BK=step, num_warps=4,
        num_stages=stages(x.device), **options,
    )  # fmt: skip
    expand[blocks, stretches.shape[0], adapters](
        y, low, lora_b, ranks, slots, stretches, tokens, outputs, parts, max_rank, first, ranks.stride(0), splits,
        y.stride(0), BM=TOKENS, BR=block, BN=COLUMNS, num_warps=4, num_stages=1, **options,
    )  # fmt: skip
    return y


def rank_block(max_rank: int) -> int:
    """Returns the rows of an adapter that a program takes at a time."""
    return int(min(RANK, max(LEAST_RANK, triton.next_power_of_2(max_rank))))


def step_of(compute: object) -> int:
    """Returns the inputs of a step of shrink()."""
    return STEP // 2 if compute == tl.float32 else STEP


def share_of(inputs: int, step: int) -> int:
    """Returns the steps of a split: settled by the weight's shape."""
    splits = min(MOST_SPLITS, triton.cdiv(inputs, SPLIT))
    return int(triton.cdiv(triton.cdiv(inputs, step), splits))


def stages(device: torch.device) -> int:
    """Returns the steps of shrink() whose loads are under way."""
    return min(3, chip_limits_for(device).stages)


@functools.cache
def stretches_on(columns: Columns, device: torch.device) -> Tensor:
    """Returns, for each block of columns, its part, first column and end. A graph that reads it is captured after a
    step that made it."""
    found, start = [], 0
    for part, width in columns:
        end = start + width
        found += [(part, column, end) for column in range(start, end, COLUMNS)]
        start = end
    return torch.tensor(found, dtype=torch.int32, device=device).reshape(-1, 3)


def variants() -> list[Variant]:
    """Blocks of 16 and 32 rows, with inputs that steps divide and others."""
    found = []
    ints = dict.fromkeys(("tokens", "first", "ranks_row", "parts"), "i32")
    pointers = {"low": "*fp32", "ranks": "*i32", "slots": "*i32"}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        compute = TYPES[dtype]
        for block in (16, 32):
            for even in (True, False):
                signature = {**pointers, "x": f"*{name}", "lora_a": f"*{name}", **ints, "share": "i32"}
                signature |= dict.fromkeys(("inputs", "max_rank", "x_row"), "i32:16")
                fixed = {"COMPUTE": compute, "EVEN": even, "BM": TOKENS, "BR": block, "BK": step_of(compute)}
                what = f"shrink {name} rank {block}{'' if even else ' uneven'}"
                found.append(Variant(what, shrink, signature, fixed, num_stages=3, rare=not even))
            signature = {**pointers, "y": f"*{name}", "lora_b": f"*{name}", "stretches": "*i32", **ints}
            signature |= {"splits": "i32", **dict.fromkeys(("outputs", "max_rank", "y_row"), "i32:16")}
            fixed = {"BM": TOKENS, "BR": block, "BN": COLUMNS}
            found.append(Variant(f"expand {name} rank {block}", expand, signature, fixed, num_stages=1))
    return found
