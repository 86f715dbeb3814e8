"""The rotary embedding of q and k in one launch, with the norms of heads before it.

A program turns some heads of one token, and holds a head's two halves in the same lanes: nothing is shuffled. Each sum
runs over one head in an order that its width alone settles.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.interface.types import HeadNorms
from quintet.platforms.gpu.kernels.variant import Variant

PER_PROGRAM = 512  # pairs of features of a program: 4 in each lane of 4 warps. Untuned


@triton.jit
def _scaled(x, weight, root, offset, SHIFTED: tl.constexpr, KIND: tl.constexpr):
    """One part of a head times its norm, rounded as the specification rounds."""
    if SHIFTED:
        return (x * root * (offset + weight)).to(KIND).to(tl.float32)
    return ((x * root).to(KIND).to(tl.float32) * weight).to(KIND).to(tl.float32)


@triton.jit
def turned(
    x, weight, row, own, first, second, i, j, eps, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, REST_BLOCK: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Heads at x [HEADS, 1], of which some are `own`, normalised and turned by a row of the table: their first and
    second halves of what turns, and the rest, in x's type."""
    kind = x.dtype.element_ty
    inside, has_rest = i < HALF, j < DIM
    a = tl.load(x + first, mask=own & inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=own & inside, other=0.0).to(tl.float32)
    rest = tl.zeros([x.shape[0], REST_BLOCK], tl.float32)
    if 2 * HALF < DIM:
        rest = tl.load(x + j, mask=own & has_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < DIM:
            squares += tl.sum(rest * rest, 1)
        root = tl.rsqrt(squares / DIM + eps)[:, None]
        a = _scaled(a, tl.load(weight + i, mask=inside, other=0.0).to(tl.float32), root, offset, SHIFTED, kind)
        b = _scaled(b, tl.load(weight + HALF + i, mask=inside, other=0.0).to(tl.float32), root, offset, SHIFTED, kind)
        if 2 * HALF < DIM:
            w = tl.load(weight + j, mask=has_rest, other=0.0).to(tl.float32)
            rest = _scaled(rest, w, root, offset, SHIFTED, kind)
    cos = tl.load(row + i, mask=inside, other=0.0).to(kind).to(tl.float32)
    sin = tl.load(row + HALF + i, mask=inside, other=0.0).to(kind).to(tl.float32)
    low = (a * cos).to(kind).to(tl.float32) - (b * sin).to(kind).to(tl.float32)
    high = (b * cos).to(kind).to(tl.float32) + (a * sin).to(kind).to(tl.float32)
    return low.to(kind), high.to(kind), rest.to(kind)


@triton.jit
def _rotary(
    q, k, q_out, k_out, q_weight, k_weight, table, positions,
    q_heads, k_heads, q_step, q_head_step, k_step, k_head_step, q_blocks, eps, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, out, weight, heads, step, head_step = q, q_out, q_weight, q_heads, q_step, q_head_step
    if block >= q_blocks:
        x, out, weight, heads, step, head_step = k, k_out, k_weight, k_heads, k_step, k_head_step
        block -= q_blocks
    head = (block * HEADS + tl.arange(0, HEADS))[:, None]
    own = head < heads
    i, j = tl.arange(0, HALF_BLOCK)[None, :], 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    first = 2 * i if NEIGHBOURS else i
    second = first + (1 if NEIGHBOURS else HALF)
    row = table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    x += token * step + head * head_step
    low, high, rest = turned(
        x, weight, row, own, first, second, i, j, eps, offset, DIM, HALF, REST_BLOCK, NORM, SHIFTED
    )
    out += (token * heads + head) * DIM
    tl.store(out + i, low, mask=own & (i < HALF))
    tl.store(out + HALF + i, high, mask=own & (i < HALF))
    if 2 * HALF < DIM:
        tl.store(out + j, rest, mask=own & (j < DIM))


def rotary(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, norms: HeadNorms | None, neighbours: bool = False
) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, Hkv, D] with a dense last axis; table [P, rot] float32; positions [T] int32.

    Without norms, `neighbours` may be paired: the results have the first of each pair, then the second.
    """
    tokens, heads, dim = q.shape
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    constants = constants_of(dim, table, norms, neighbours)
    q_blocks, k_blocks = (triton.cdiv(x.shape[1], constants["HEADS"]) for x in (q, k))
    of_q, of_k, eps, offset = (q, k, 0.0, 0.0) if norms is None else norms
    _rotary[(tokens, q_blocks + k_blocks)](
        q, k, q_out, k_out, of_q, of_k, table, positions, heads, k.shape[1],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), q_blocks, eps, offset, **constants,
    )  # fmt: skip
    return q_out, k_out


def constants_of(dim: int, table: Tensor, norms: HeadNorms | None, neighbours: bool) -> dict[str, Any]:
    shifted = norms is not None and norms.offset != 0
    return _constants(dim, table.shape[1] // 2, norms is not None, shifted) | {"NEIGHBOURS": neighbours}


def _constants(dim: int, half: int, norm: bool, shifted: bool) -> dict[str, Any]:
    half_block = triton.next_power_of_2(max(half, 1))
    return {
        "DIM": dim,
        "HALF": half,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": triton.next_power_of_2(max(dim - 2 * half, 1)),
        "HEADS": max(1, PER_PROGRAM // max(half_block, triton.next_power_of_2(dim) // 2)),
        "NORM": norm,
        "SHIFTED": shifted,
        "NEIGHBOURS": False,
    }


def variants() -> list[Variant]:
    """Heads of 64, 128 and 256, some turned in part."""
    pointers = ("q", "k", "q_out", "k_out", "q_weight", "k_weight")
    steps = dict.fromkeys(("q_step", "q_head_step", "k_step", "k_head_step"), "i32:16")
    numbers = {"table": "*fp32", "positions": "*i32", "q_heads": "i32", "k_heads": "i32", "q_blocks": "i32"}
    numbers |= {**steps, "eps": "fp32", "offset": "fp32"}
    found = []
    for kind in ("bf16", "fp16"):
        signature = dict.fromkeys(pointers, f"*{kind}") | numbers
        for dim, turned in ((64, 64), (128, 128), (128, 64), (256, 256)):
            for norm, shifted in ((False, False), (True, False), (True, True)):
                name = f"rotary {kind} {turned} of {dim}, norm {norm}, shifted {shifted}"
                found.append(Variant(name, _rotary, signature, _constants(dim, turned // 2, norm, shifted)))
        paired = _constants(128, 32, False, False) | {"NEIGHBOURS": True}
        found.append(Variant(f"rotary {kind} 64 of 128, neighbours", _rotary, signature, paired))
    return found
