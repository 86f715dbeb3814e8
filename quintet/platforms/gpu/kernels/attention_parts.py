"""What both attention kernels are made of: rows of paged K and V, and a running softmax (Dao et al. 2022) in base 2.

Scores are multiplied by log2(e) before anything else happens to them. Sums are kept in float32.
"""

import triton
import triton.language as tl

from quintet.platforms.gpu.kernels.formats import eight

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PLAIN: tl.constexpr = tl.constexpr(0)  # a row is numbers of a type that the device converts
INT8: tl.constexpr = tl.constexpr(1)  # numbers, then the bytes of a float32 scale
E4M3: tl.constexpr = tl.constexpr(2)  # bytes of e4m3fn, where Triton does not know that type


@triton.jit
def key_rows(table, slots, end, head, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Of these slots of one request, the rows of their keys in a cache seen as rows; past `end` those of page 0."""
    pages = tl.load(table + slots // PAGE_SIZE, mask=slots < end, other=0).to(tl.int64)
    return (pages * (2 * KV_HEADS) + head) * PAGE_SIZE + slots % PAGE_SIZE


@triton.jit
def load_rows(x, rows, inside, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK_D]; zeros past DIM, and if MASKED in rows that are not inside."""
    columns = tl.arange(0, BLOCK_D)
    at = x + rows[:, None] * WIDTH + columns[None, :]
    if BLOCK_D == DIM:
        if MASKED:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:
            return tl.load(at)
    else:
        if MASKED:
            return tl.load(at, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def widened(x, STORED: tl.constexpr, dtype: tl.constexpr):
    """The numbers of cached rows in another type, without their scales."""
    if STORED == E4M3:
        nothing = (x & 0x7F) == 0x7F
        x = tl.where(nothing, float("nan"), eight(x, tl.float16, 3, 7))
    return x.to(dtype)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def fold(
    acc, best, total, q, kv, scales, rows, inside, seen, distance, slopes, gain, cap,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    STORED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the keys and values of a block of slots in.

    q [M, BLOCK_D]; acc [M, BLOCK_D], best and total [M] are the state; rows and inside [N]; if MASKED, seen [M or 1, N]
    says who sees whom, and values that are not inside are zeros: what a page holds past its request's end may be NaN.
    """
    k = widened(load_rows(kv, rows, inside, WIDTH, DIM, BLOCK_D, False), STORED, q.dtype)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if STORED == INT8:
        s *= tl.load(scales + rows * (WIDTH // 4) + DIM // 4)[None, :]
    s *= gain
    if CAPPED:
        s = cap * tanh(s)
    if SLOPED:
        s += slopes[:, None] * distance
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    higher = tl.maximum(best, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    weights = tl.exp2(s - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    acc *= shrink[:, None]
    rows += KV_HEADS * PAGE_SIZE
    v = load_rows(kv, rows, inside, WIDTH, DIM, BLOCK_D, MASKED)
    if STORED == INT8:
        # on the values, not the weights: the product of a weight and a scale may be too small for float16
        scale = tl.load(scales + rows * (WIDTH // 4) + DIM // 4, mask=inside, other=0.0)
        v = (v.to(tl.float32) * scale[:, None]).to(q.dtype)
    else:
        v = widened(v, STORED, q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return acc, higher, total


@triton.jit
def divided(acc, best, total, sinks, heads, HAS_SINKS: tl.constexpr):
    """The results [M, BLOCK_D] of a state, once its heads' sinks have joined the softmax."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads).to(tl.float32) * LOG2E
        higher = tl.maximum(best, sink)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc *= shrink[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
