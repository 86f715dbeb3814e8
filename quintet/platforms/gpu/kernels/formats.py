"""Numbers of 4 and 8 bits, from and to what a GPU computes in, by their bits: no instruction of one chip is needed.

Not verified on a GPU yet.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Float8Bits(NamedTuple):
    """A format of 8 bits in floating point."""

    mantissa: int  # bits
    bias: int  # of the exponent
    last: int  # the largest finite number's bits


FLOAT8 = {
    torch.float8_e4m3fn: Float8Bits(3, 7, 0x7E),
    torch.float8_e5m2: Float8Bits(2, 15, 0x7B),
    torch.float8_e4m3fnuz: Float8Bits(3, 8, 0x7F),
    torch.float8_e5m2fnuz: Float8Bits(2, 16, 0x7F),
}
# Whole numbers up to 255, taken for the bits of a bfloat16 or a float16, are themselves times its smallest one (2^-133,
# 2^-24), subnormal or not. One multiplication and addition of two at a time brings them to 1 / UNITS of what they
# stand for, exactly; conversions from integers would cost several times as much. A device must not take subnormals for
# 0 there; the providers' probes would see it.
UNITS = {tl.bfloat16: 64.0, tl.float16: 512.0}
HALVES = tl.constexpr(12582912.0)  # 1.5 * 2^23, where a float32's last bit is 1: adding it rounds half to even


@triton.jit
def rounded(x):
    """Rounds to whole numbers, half to even; |x| up to 2^22."""
    return (x + HALVES) - HALVES


@triton.jit
def fours(raw, COMPUTE: tl.constexpr):
    """Two numbers 0..15 in uint8 -> (the low bits', the high bits') -8..7, divided by COMPUTE's unit."""
    if COMPUTE == tl.int8:
        return (raw & 15).to(tl.int8) - 8, (raw >> 4).to(tl.int8) - 8
    elif COMPUTE == tl.float32:
        return (raw & 15).to(tl.float32) - 8.0, (raw >> 4).to(tl.float32) - 8.0
    else:
        wide = raw.to(tl.int16)
        low, high = (wide & 15).to(COMPUTE, bitcast=True), (wide & 240).to(COMPUTE, bitcast=True)
        if COMPUTE == tl.bfloat16:
            return low * (2.0**127) - 0.125, high * (2.0**123) - 0.125
        else:
            return low * (2.0**15) - 0.015625, high * (2.0**11) - 0.015625


@triton.jit
def whole(raw, COMPUTE: tl.constexpr):
    """int8, divided by COMPUTE's unit."""
    if COMPUTE == tl.bfloat16:
        wide = (raw.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int16)
        return wide.to(tl.bfloat16, bitcast=True) * (2.0**127) - 2.0
    elif COMPUTE == tl.float16:
        wide = (raw.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.int16)
        return wide.to(tl.float16, bitcast=True) * (2.0**15) - 0.25
    else:
        return raw.to(COMPUTE)


@triton.jit
def eight(bits, COMPUTE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """A float8's bits in uint8 -> its value in COMPUTE, exactly: put in place there, subnormals too, and scaled.

    Infinities and NaN come out as the numbers after the largest.
    """
    if COMPUTE == tl.bfloat16:
        wide = ((bits & 0x7F).to(tl.int16) << (7 - MANTISSA)) | ((bits & 0x80).to(tl.int16) << 8)
        return wide.to(tl.bfloat16, bitcast=True) * (2.0 ** (127 - BIAS))
    elif COMPUTE == tl.float16:
        wide = ((bits & 0x7F).to(tl.int16) << (10 - MANTISSA)) | ((bits & 0x80).to(tl.int16) << 8)
        return wide.to(tl.float16, bitcast=True) * (2.0 ** (15 - BIAS))
    else:
        wide = ((bits & 0x7F).to(tl.int32) << (23 - MANTISSA)) | ((bits & 0x80).to(tl.int32) << 24)
        return wide.to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))


@triton.jit
def to_eight(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr):
    """float32 -> the nearest float8's bits, half to even, at most the largest finite one."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    cut: tl.constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (cut - 1)) - 1) + ((size >> cut) & 1)) >> cut) - ((127 - BIAS) << MANTISSA)
    small = rounded(tl.minimum(tl.abs(x) * (2.0 ** (BIAS - 1 + MANTISSA)), 64.0)).to(tl.int32)
    code = tl.minimum(tl.where(size < ((128 - BIAS) << 23), small, normal), LAST)
    sign = (bits >> 24) & 0x80
    return tl.where(code == 0, 0, code | sign).to(tl.uint8)  # -0 is no number in some formats
