"""The 8-bit and 4-bit formats of caches: decoded by sign, exponent and mantissa, and what is nearest in each."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.conformance.cases.linear import away_from_ties
from quintet.interface.types import INT4

MAX_INT8 = 127  # steps of a row's scale; -128 is not used
INT4_GROUP, MAX_INT4 = 32, 15  # values that share a scale and a minimum; the highest code


@dataclass(frozen=True)
class Float8Encoding:
    """An exponent of 0 is a subnormal's (Micikevicius et al. 2022)."""

    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    unsigned_zero: bool = False  # -0 is the only NaN, and nothing is infinite
    infinities: bool = False  # the largest exponent is kept for them, and for NaN

    def value(self, code: int) -> float:
        """Returns the number that one byte encodes."""
        sign, fraction = (-1.0 if code >> 7 else 1.0), code & (2**self.mantissa - 1)
        power, last = code >> self.mantissa & (2**self.exponent - 1), 2**self.exponent - 1
        if self.unsigned_zero:
            if code == 0x80:
                return math.nan
        elif power == last and self.infinities:
            return math.nan if fraction else sign * math.inf
        elif power == last and fraction == 2**self.mantissa - 1:
            return math.nan
        whole = fraction + (2**self.mantissa if power else 0)
        return sign * math.ldexp(whole, max(power, 1) - self.bias - self.mantissa)

    @functools.cached_property
    def numbers(self) -> Tensor:
        """Every finite one once, in order, in float64."""
        values = {self.value(code) for code in range(256)}
        return torch.tensor(sorted(v for v in values if math.isfinite(v)), dtype=torch.float64)

    def nearest(self, x: Tensor) -> Tensor:
        """Rounds x to `numbers`, in float64, to the largest at most; of two as near, to the one with last bit 0."""
        there, x = self.numbers, x.double()
        above = torch.searchsorted(there, x.clamp(there[0], there[-1])).clamp(1, len(there) - 1)
        low, high = there[above - 1], there[above]
        down, up = x - low, high - x
        even = self._even[above - 1]
        nearest = torch.where((down < up) | ((down == up) & even), low, high)
        return torch.where(x.isnan(), x, nearest)

    @functools.cached_property
    def _even(self) -> Tensor:
        """True for each of `numbers` with last bit 0."""
        codes = {self.value(code): code for code in range(255, -1, -1)}
        return torch.tensor([codes[v] % 2 == 0 for v in self.numbers.tolist()])


FLOATS = {
    torch.float8_e4m3fn: Float8Encoding(4, 3, 7),
    torch.float8_e4m3fnuz: Float8Encoding(4, 3, 8, unsigned_zero=True),
    torch.float8_e5m2: Float8Encoding(5, 2, 15, infinities=True),
    torch.float8_e5m2fnuz: Float8Encoding(5, 2, 16, unsigned_zero=True),
}


def through_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x [..., D] as a cache of this type gives it back: an exact model of ops.attention.to_cache_rows()."""
    if dtype in FLOATS:
        return FLOATS[dtype].nearest(x)
    if dtype == torch.int8:
        scale = x.float().abs().amax(-1, keepdim=True) / MAX_INT8
        steps = (x.float() / torch.where(scale > 0, scale, 1.0)).round().clamp(-MAX_INT8, MAX_INT8)
        return (steps * scale).double()
    if dtype == INT4:
        return torch.cat([_through_int4(group) for group in x.split(INT4_GROUP, -1)], -1)
    return x.double()


def _hadamard(size: int) -> Tensor:
    """[size, size] float64: -1 where two numbers have an odd number of bits in common; the identity where size is no
    power of two."""
    if size & (size - 1):
        return torch.eye(size, dtype=torch.float64)
    signs = [[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64)


def _int4_codes(turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """turned [..., n] float64 -> codes before they are rounded, scale and minimum [..., 1]."""
    least = turned.amin(-1, keepdim=True).half().double()
    scale = ((turned.amax(-1, keepdim=True) - least) / MAX_INT4).half().double()
    return ((turned - least) / torch.where(scale > 0, scale, 1.0)).clamp(0, MAX_INT4), scale, least


def _turn(group: Tensor) -> tuple[Tensor, Tensor, int]:
    """A group turned, and what turns it back: a matrix and its divisor. See ops.pages.hadamard()."""
    matrix = _hadamard(group.shape[-1])
    bits = 0 if group.shape[-1] & (group.shape[-1] - 1) else group.shape[-1].bit_length() - 1
    return group.double() @ matrix / 2 ** (bits // 2), matrix, 2 ** (bits - bits // 2)


def _through_int4(group: Tensor) -> Tensor:
    turned, matrix, divisor = _turn(group)
    codes, scale, least = _int4_codes(turned)
    return (codes.round() * scale + least) @ matrix / divisor


def _away_from_int4_ties(group: Tensor) -> Tensor:
    """A group of zeros in the place of one that has a code, a scale or a minimum near the middle of two."""
    turned = _turn(group)[0]
    codes, scale, least = _int4_codes(turned)
    near = 1e-5 * turned.abs().amax(-1, keepdim=True) / scale.clamp(min=1e-12)
    sure = ((codes - near).round() == (codes + near).round()).all(-1, keepdim=True)
    for factor in (1 - 1e-5, 1 + 1e-5):
        _, other_scale, other_least = _int4_codes(turned * factor)
        sure &= (other_scale == scale) & (other_least == least)
    return torch.where(sure, group, 0)


def away_from_rounding_ties(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] with 0 for what lies so near the middle of two numbers of the type that one rounding decides."""
    if dtype in FLOATS:
        nearest = FLOATS[dtype].nearest
        return torch.where(nearest(x * (1 - 2**-7)) == nearest(x * (1 + 2**-7)), x, 0)
    if dtype == INT4:
        return torch.cat([_away_from_int4_ties(group) for group in x.split(INT4_GROUP, -1)], -1)
    return (
        away_from_ties(x.flatten(0, -2), 0, float(MAX_INT8), torch.round).reshape(x.shape) if dtype == torch.int8 else x
    )
