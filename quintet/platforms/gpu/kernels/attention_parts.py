"""Parts of both attention kernels: rows of paged K and V, and a running softmax (Dao et al. 2022) in base 2.

Scores are multiplied by log2(e) before anything else happens to them. Sums are kept in float32.
"""

import triton
import triton.language as tl

from quintet.platforms.gpu.kernels.formats import eight

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PLAIN: tl.constexpr = tl.constexpr(0)  # a row is numbers of a type that the device converts
INT8: tl.constexpr = tl.constexpr(1)  # numbers, then the bytes of a float32 scale
E4M3: tl.constexpr = tl.constexpr(2)  # bytes of e4m3fn, where Triton does not know that type
E5M2: tl.constexpr = tl.constexpr(3)  # bytes of e5m2: the upper half of a float16
E4M3FNUZ: tl.constexpr = tl.constexpr(4)  # bytes of e4m3fnuz, where Triton does not know that type


@triton.jit
def key_rows(
    table, slots, end, head, KV_HEADS: tl.constexpr, PIECES: tl.constexpr, PAGE_SIZE: tl.constexpr, V_ROWS: tl.constexpr
):  # fmt: skip
    """Returns the rows of the keys of a request's slots in a cache seen as rows; past `end` those of page 0."""
    pages = tl.load(table + slots // PAGE_SIZE, mask=slots < end, other=0).to(tl.int64)
    return (pages * (KV_HEADS + V_ROWS // PAGE_SIZE) + head // PIECES) * PAGE_SIZE + slots % PAGE_SIZE


@triton.jit
def query_rows(q, at, wanted, columns, FIRST: tl.constexpr, COUNT: tl.constexpr, dtype: tl.constexpr):
    """[M, columns] from FIRST on of the rows of q that begin at `at`; zeros past COUNT and where not wanted."""
    there = wanted[:, None] & (columns < COUNT)[None, :]
    return tl.load(q + (at + FIRST)[:, None] + columns[None, :], mask=there, other=0.0).to(dtype)


@triton.jit
def load_rows(
    x, rows, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[N, BLOCK_D] from number FIRST on of rows of WIDTH; zeros past DIM, and if MASKED in rows that are not inside.

    Triton 3.6 copies as many bytes at a time as the mask alone allows, and a load without one has the loop's: also
    where rows are aligned to fewer (an int8 row of 84 or 132 bytes to 4), which ends in a misaligned address. So the
    mask may change every EVEN numbers: the largest power of two that all rows begin at.
    """
    EVEN: tl.constexpr = (FIRST | WIDTH | DIM) & -(FIRST | WIDTH | DIM)
    columns = tl.arange(0, BLOCK_D)
    at = x + FIRST + rows[:, None] * WIDTH + columns[None, :]
    if BLOCK_D == DIM and EVEN >= 16:
        if MASKED:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:
            return tl.load(at)
    else:
        wanted = (columns // EVEN < DIM // EVEN)[None, :]
        if MASKED:
            return tl.load(at, mask=inside[:, None] & wanted, other=0.0)
        else:
            return tl.load(at, mask=wanted, other=0.0)


@triton.jit
def widened(x, STORED: tl.constexpr, dtype: tl.constexpr):
    """The numbers of cached rows in another type, without their scales."""
    if STORED == E4M3:
        nothing = (x & 0x7F) == 0x7F
        x = tl.where(nothing, float("nan"), eight(x, tl.float16, 3, 7))
    elif STORED == E4M3FNUZ:
        x = tl.where(x == 0x80, float("nan"), eight(x, tl.float16, 3, 8))
    elif STORED == E5M2:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def fold(
    acc, best, total, q, q_rest, kv, scales, rows, inside, seen, distance, slopes, gain, cap,
    V_ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    STORED: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes the keys and values of a block of slots in.

    q [M, BLOCK_D] and, where K is longer than V, q_rest [M, BLOCK_R]; acc [M, BLOCK_D], best and total [M] are the
    state; rows and inside [N]; if MASKED, seen [M or 1, N] says who sees whom, and values that are not inside are
    zeros: what a page holds past its request's end, and page 0 before a window, may be NaN. Values are V_ROWS rows
    behind their keys; where that is 0 they are the keys' beginning, and read once.
    """
    AGAIN: tl.constexpr = MASKED and V_ROWS == 0
    raw = load_rows(kv, rows, inside, 0, WIDTH, VALUE, BLOCK_D, AGAIN)
    s = tl.dot(q, tl.trans(widened(raw, STORED, q.dtype)), input_precision="ieee")
    beyond = s
    if BLOCK_R:
        rest = load_rows(kv, rows, inside, VALUE, WIDTH, DIM - VALUE, BLOCK_R, False)
        # scaled apart: Triton makes one accumulator of a plain sum of two products, and up to 3.7 gets that wrong on
        # compute capability 10.0 (triton #10821)
        beyond = tl.dot(q_rest, tl.trans(widened(rest, STORED, q.dtype)), input_precision="ieee")
    if STORED == INT8:
        scale = tl.load(scales + rows * (WIDTH // 4) + DIM // 4)[None, :]
        s *= scale
        if BLOCK_R:
            beyond *= scale
    s *= gain
    if BLOCK_R:
        s += beyond * gain
    if CAPPED:
        s = cap * tanh(s)
    if SLOPED:
        s -= slopes[:, None] * tl.abs(distance)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    higher = tl.maximum(best, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    weights = tl.exp2(s - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    acc *= shrink[:, None]
    v = raw
    if V_ROWS:
        rows += V_ROWS
        v = load_rows(kv, rows, inside, 0, WIDTH, VALUE, BLOCK_D, MASKED)
    if STORED == INT8:
        # on the values, not the weights: the product of a weight and a scale may be too small for float16
        of_values = tl.load(scales + rows * (WIDTH // 4) + DIM // 4, mask=inside, other=0.0)
        v = (v.to(tl.float32) * of_values[:, None]).to(q.dtype)
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
