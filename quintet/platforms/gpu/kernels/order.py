"""Numbers in order: float32 as whole numbers that sort alike, a token beside its score, and the best of each row.

Whole numbers are compared and counted, so no result depends on the order of lanes or programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

CHUNK = 1024  # logits of a program: 149 programs for a row of 151,936, so that one row fills most of a GPU. Untuned
SCRATCH = 2**26  # tokens that are listed at once, over all rows: 256 MiB
NEVER = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-(2**63))  # below every score, and its upper half is no number's: it reads as NaN


@triton.jit
def key_of(x):
    """int32 in the order of float32 numbers; the two zeros are equal, and NaN is above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def number_of(key):
    """The float32 of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scored(x, token):
    """int64 in the order of float32 scores; of equal ones, the first token's is the largest."""
    return (key_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def score_in(best):
    return number_of((best >> 32).to(tl.int32))


@triton.jit
def token_in(best):
    return 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def kth_largest(keys, k, lo, hi):
    """The largest of [lo, hi] that k of these int32 keys reach; lo if fewer do."""
    lo, hi = lo.to(tl.int64), hi.to(tl.int64)
    while lo < hi:
        middle = lo + ((hi - lo + 1) >> 1)
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= k:
            lo = middle
        else:
            hi = middle - 1
    return lo.to(tl.int32)


@triton.jit
def _best_of_parts(logits, best, step, vocab, parts, CHUNK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER).to(tl.float32)
    tl.store(best + row * parts + part, tl.max(scored(x, token), 0))


@triton.jit
def _winner(best, out, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    top = tl.max(tl.load(best + row * parts + part, mask=part < parts, other=LOWEST), 0)
    finite = tl.abs(score_in(top)) < float("inf")
    tl.store(out + row, tl.where(finite, token_in(top), -1))


def best_of_parts(logits: Tensor) -> Tensor:
    """logits [R, V] in dense rows -> scored() maxima [R, ceil(V / CHUNK)] int64."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, CHUNK)
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _best_of_parts[(rows, parts)](logits, best, logits.stride(0), vocab, parts, CHUNK=CHUNK)
    return best


def winner(best: Tensor) -> Tensor:
    """scored() maxima [R, parts] -> the best token [R] int32; -1 where its score is NaN or infinite."""
    rows, parts = best.shape
    out = torch.empty(rows, dtype=torch.int32, device=best.device)
    _winner[(rows,)](best, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return out


def variants() -> list[Variant]:
    """Variants of each type of logits, and of the parts of vocabularies up to 262,144."""
    numbers = {"best": "*i64", "step": "i32:16", "vocab": "i32:16", "parts": "i32"}
    found = [
        Variant(f"best of parts {kind}", _best_of_parts, {"logits": f"*{kind}", **numbers}, {"CHUNK": CHUNK})
        for kind in ("bf16", "fp16", "fp32")
    ]
    signature = {"best": "*i64", "out": "*i32", "parts": "i32"}
    return found + [Variant(f"winner {p}", _winner, signature, {"PARTS": p}, 1) for p in (32, 256)]
