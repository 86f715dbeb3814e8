"""Activations to 8 bits, each row or each group of a row with a scale of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.ops.quantized import SMALLEST
from quintet.platforms.gpu.kernels.formats import FLOAT8, rounded, to_eight
from quintet.platforms.gpu.kernels.variant import Variant

WIDEST = 2048  # inputs of several groups that one program holds; an untuned guess: 16 per thread of 4 warps
# Inputs of one group that a program holds, 32 per thread of 16 warps: all but the longest rows of models. An H100 took
# 2.5 us for a row of 4,096 and 8.6 us for one of 14,336 when a program went through it twice, 2,048 at a time.
WHOLE = 16_384
LEAST = tl.constexpr(SMALLEST)


@triton.jit(do_not_specialize=["scale_step"])  # tokens, where scales lie group by group
def quantize(
    values, scales, x, inputs, groups, group, x_row, scale_row, scale_step, LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """x [T, K] -> values [T, K], each of `group` inputs by LARGEST / their largest, and scales [T, G] that undo it.

    One program for P groups of a token, which it goes through twice in steps of C, or holds if ONCE. MANTISSA 0: whole
    numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    each = tl.program_id(1) * P + tl.arange(0, P)
    inside = tl.arange(0, C)
    begin = each[:, None] * group + inside[None, :]
    there = (inside[None, :] < group) & (begin < inputs)
    held = tl.load(x + row * x_row + begin, mask=there, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(held), 1)
    if not ONCE:
        for step in range(C, group, C):
            there = (step + inside[None, :] < group) & (begin + step < inputs)
            got = tl.load(x + row * x_row + begin + step, mask=there, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.max(tl.abs(got), 1))
    peak = tl.maximum(peak, LEAST)
    largest = tl.zeros((P,), tl.float32) + LARGEST
    ratio = tl.div_rn(largest, peak)[:, None]
    tl.store(scales + row * scale_row + each * scale_step, tl.div_rn(peak, largest), mask=each < groups)
    to = values + row * inputs + begin
    if ONCE:
        _store(to, held * ratio, there, MANTISSA, BIAS, LAST)
    else:
        for step in range(0, group, C):
            there = (step + inside[None, :] < group) & (begin + step < inputs)
            got = tl.load(x + row * x_row + begin + step, mask=there, other=0.0).to(tl.float32)
            _store(to + step, got * ratio, there, MANTISSA, BIAS, LAST)


@triton.jit
def _store(to, x, there, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr):
    if MANTISSA == 0:
        tl.store(to, rounded(x).to(tl.int8), mask=there)
    else:
        tl.store(to, to_eight(x, MANTISSA, BIAS, LAST), mask=there)


def quantized(x: Tensor, group: int, kind: torch.dtype, together: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (int8, or a float8's bits in uint8, [T, K]; scales [T, ceil(K / group)] float32).

    `together`: the scales of a group lie side by side, as cuBLASLt reads those of blocks.
    """
    tokens, inputs = x.shape
    groups = triton.cdiv(inputs, group)
    values = torch.empty((tokens, inputs), dtype=torch.int8 if kind == torch.int8 else torch.uint8, device=x.device)
    shape = (groups, tokens) if together else (tokens, groups)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    scales = scales.t() if together else scales
    (mantissa, bias, last), largest = FLOAT8.get(kind, (0, 0, 0)), 127.0
    if mantissa:
        largest = torch.finfo(kind).max
    step = triton.next_power_of_2(group)
    step = step if step <= WHOLE else WIDEST
    many = max(1, min(triton.next_power_of_2(groups), WIDEST // step))
    if tokens:
        quantize[tokens, triton.cdiv(groups, many)](
            values, scales, x, inputs, groups, group, x.stride(0), *scales.stride(), LARGEST=largest, MANTISSA=mantissa,
            BIAS=bias, LAST=last, P=many, C=step, ONCE=step >= group, num_warps=warps_for(step),
        )  # fmt: skip
    return values, scales


def warps_for(step: int) -> int:
    """Returns the warps of a program that holds so many inputs of a group: 16 to a thread, 32 for the largest."""
    return min(16, max(4, step // 512))


def variants() -> list[Variant]:
    """Variants as the products of real models want them: a token's whole row, and groups of 32 and 128."""
    kinds: dict[str, tuple[torch.dtype, int, int]] = {
        "rows": (torch.int8, 1, WHOLE),
        "long rows": (torch.int8, 1, WIDEST),
        "groups of 32": (torch.int8, WIDEST // 32, 32),
        "rows in fp8": (torch.float8_e4m3fn, 1, WHOLE),
        "rows of 4096 in fp8": (torch.float8_e4m3fn, 1, 4096),
        "groups of 128 in fp8": (torch.float8_e4m3fn, WIDEST // 128, 128),
    }
    found = []
    for dtype in ("bf16", "fp16"):
        for what, (kind, many, step) in kinds.items():
            mantissa, bias, last = FLOAT8.get(kind, (0, 0, 0))
            signature = {"values": "*u8" if mantissa else "*i8", "scales": "*fp32", "x": f"*{dtype}", "groups": "i32"}
            signature |= {"scale_row": "i32", "scale_step": "i32"}
            signature |= dict.fromkeys(("inputs", "group", "x_row"), "i32:16")
            fixed = {"LARGEST": 448.0 if mantissa else 127.0, "MANTISSA": mantissa, "BIAS": bias, "LAST": last}
            fixed |= {"P": many, "C": step, "ONCE": what != "long rows"}
            # sm_100's assembler would rather spill 2 registers than take more than 32
            how = signature, fixed, warps_for(step)
            found.append(Variant(f"quantize {what} {dtype}", quantize, *how, max_spills=2))
    return found
