"""The blocks of ggml's types (llama.cpp, ggml-common.h) as whole numbers, scales and minima.

A block of uint8 holds V values of a row. `fields` undoes all of the packings: bits at several heights of a byte, of
runs of so many bytes, are neighbouring runs of values.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.interface.weights import WeightFormat
from quintet.layers.quantization.formats import ggml_grids as grids
from quintet.ops.quantized import MIDDLE

SHIFTS_4BIT = (0, 4)  # heights of a byte's fields of 4 bits; of 2, and of 1
SHIFTS_2BIT = (0, 2, 4, 6)
SHIFTS_1BIT = tuple(range(8))
IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled: its scales are halved


class UnpackedBlocks(NamedTuple):
    """Numbers of blocks [N, B]."""

    values: Tensor  # [N, B, V]: uint8 where 4 bits hold them, else int8
    scales: Tensor  # float32 [N, B, V / group]
    mins: Tensor | None = None


class BlockType(NamedTuple):
    """Form that a type is held in, and its unpacking: uint8 [N, B, bytes of a block] -> Numbers."""

    format: WeightFormat
    unpack: Callable[[Tensor], UnpackedBlocks]


def unpack_bits(x: Tensor, run: int, heights: Iterable[int], bits: int) -> Tensor:
    """uint8 [..., M] -> [..., M * heights]: of each run of bytes the fields at the first height, then the second."""
    shifts = torch.tensor(tuple(heights), dtype=torch.uint8)[:, None]
    return (x.unflatten(-1, (-1, 1, run)) >> shifts & (1 << bits) - 1).flatten(-3)


def read_float16(x: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block -> float32 [N, B, 1]."""
    return x[..., at : at + 2].contiguous().view(torch.float16).float()


def _signed(x: Tensor, zero: int) -> Tensor:
    return x.to(torch.int8) - zero


def _q4_0(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(unpack_bits(x[..., 2:], 16, SHIFTS_4BIT, 4), read_float16(x, 0))


def _q4_1(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(unpack_bits(x[..., 4:], 16, SHIFTS_4BIT, 4), read_float16(x, 0), read_float16(x, 2))


def _q5_0(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_signed(_unpack_5bit(x[..., 6:], x[..., 2:6]), 16), read_float16(x, 0))


def _q5_1(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_unpack_5bit(x[..., 8:], x[..., 4:8]).to(torch.int8), read_float16(x, 0), read_float16(x, 2))


def _unpack_5bit(low: Tensor, high: Tensor) -> Tensor:
    return unpack_bits(low, 16, SHIFTS_4BIT, 4) | unpack_bits(high, 1, SHIFTS_1BIT, 1) << 4


def _q8_0(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(x[..., 2:].view(torch.int8), read_float16(x, 0))


def _q2_k(x: Tensor) -> UnpackedBlocks:
    both = x[..., :16]
    return UnpackedBlocks(
        unpack_bits(x[..., 16:80], 32, SHIFTS_2BIT, 2),
        read_float16(x, 80) * (both & 15),
        -(read_float16(x, 82) * (both >> 4)),
    )


def _q3_k(x: Tensor) -> UnpackedBlocks:
    values = unpack_bits(x[..., 32:96], 32, SHIFTS_2BIT, 2) | unpack_bits(x[..., :32], 32, SHIFTS_1BIT, 1) << 2
    scales = unpack_bits(x[..., 96:104], 8, SHIFTS_4BIT, 4) | unpack_bits(x[..., 104:108], 4, SHIFTS_2BIT, 2) << 4
    return UnpackedBlocks(values + (MIDDLE - 4), read_float16(x, 108) * _signed(scales, 32))  # 0..7 stand for -4..3


def _q4_k(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(unpack_bits(x[..., 16:], 32, SHIFTS_4BIT, 4), *_six_bit_scales(x))


def _q5_k(x: Tensor) -> UnpackedBlocks:
    values = unpack_bits(x[..., 48:], 32, SHIFTS_4BIT, 4) | unpack_bits(x[..., 16:48], 32, SHIFTS_1BIT, 1) << 4
    return UnpackedBlocks(values.to(torch.int8), *_six_bit_scales(x))


def _six_bit_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and minima of 6 bits in 12 bytes, times the two floats before them."""
    first, second, third = x[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], -1)
    mins = torch.cat([second & 63, third >> 4 | second >> 2 & 48], -1)
    return read_float16(x, 0) * scales, -(read_float16(x, 2) * mins)


def _q6_k(x: Tensor) -> UnpackedBlocks:
    values = unpack_bits(x[..., :128], 64, SHIFTS_4BIT, 4) | unpack_bits(x[..., 128:192], 32, SHIFTS_2BIT, 2) << 4
    return UnpackedBlocks(_signed(values, 32), read_float16(x, 208) * x[..., 192:208].view(torch.int8))


def _iq4_xs(x: Tensor) -> UnpackedBlocks:
    scales = unpack_bits(x[..., 4:8], 1, SHIFTS_4BIT, 4) | unpack_bits(x[..., 2:4], 1, SHIFTS_2BIT, 2) << 4
    return UnpackedBlocks(unpack_bits(x[..., 8:], 16, SHIFTS_4BIT, 4), read_float16(x, 0) * _signed(scales, 32))


def _tq1_0(x: Tensor) -> UnpackedBlocks:
    """Five digits to the base 3 in a byte, as a fraction of 256."""
    runs = (x[..., :32], 32, 5), (x[..., 32:48], 16, 5), (x[..., 48:52], 4, 4)
    digits = [_digits(each.unflatten(-1, (-1, 1, run)), count).flatten(-3) for each, run, count in runs]
    return UnpackedBlocks(torch.cat(digits, -1) + (MIDDLE - 1), read_float16(x, 52).repeat(1, 1, 2))


def _digits(x: Tensor, count: int) -> Tensor:
    powers = torch.tensor([3**power for power in range(count)], dtype=torch.uint8)[:, None]
    return ((x * powers).to(torch.int16) * 3 >> 8).to(torch.uint8)


def _tq2_0(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(
        unpack_bits(x[..., :64], 32, SHIFTS_2BIT, 2) + (MIDDLE - 1), read_float16(x, 64).repeat(1, 1, 2)
    )


def _mxfp4(x: Tensor) -> UnpackedBlocks:
    """Scales are powers of 2 (OCP's MX, 2023)."""
    power = x[..., :1].int() - 128
    halves = torch.ldexp(torch.ones(power.shape), power)
    return UnpackedBlocks(unpack_bits(x[..., 1:], 16, SHIFTS_4BIT, 4), halves)


def _nvfp4(x: Tensor) -> UnpackedBlocks:
    scales = torch.where(x[..., :4] == 0x7F, 0, x[..., :4]).view(torch.float8_e4m3fn).float()
    return UnpackedBlocks(unpack_bits(x[..., 4:], 8, SHIFTS_4BIT, 4), scales / 2)


def _iq1_m(x: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(*grids.iq1_m(grids.iq1_m_scale(x), x))


def _grid_type(read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], UnpackedBlocks]:
    """Reads blocks that begin with their scale."""
    return lambda x: UnpackedBlocks(*read(read_float16(x, 0), x[..., 2:]))


def _int_format(bits: int, group: int, mins: bool = False) -> WeightFormat:
    """4 bits with minima have zero points of 0: what stands for a number is counted from there, and not from 8."""
    return WeightFormat("int4" if bits == 4 else "int8", bits, 16, group, zeros=mins and bits == 4, mins=mins)


def _codebook_format(group: int, values: Iterable[float]) -> WeightFormat:
    return WeightFormat("table4", 4, 16, group, codebook=tuple(float(each) for each in values))


TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType(_int_format(4, 32), _q4_0),
    "Q4_1": BlockType(_int_format(4, 32, mins=True), _q4_1),
    "Q5_0": BlockType(_int_format(8, 32), _q5_0),
    "Q5_1": BlockType(_int_format(8, 32, mins=True), _q5_1),
    "Q8_0": BlockType(_int_format(8, 32), _q8_0),
    "Q2_K": BlockType(_int_format(4, 16, mins=True), _q2_k),
    "Q3_K": BlockType(_int_format(4, 16), _q3_k),
    "Q4_K": BlockType(_int_format(4, 32, mins=True), _q4_k),
    "Q5_K": BlockType(_int_format(8, 32, mins=True), _q5_k),
    "Q6_K": BlockType(_int_format(8, 16), _q6_k),
    "IQ4_NL": BlockType(_codebook_format(32, IQ4_CODEBOOK), _q4_0),
    "IQ4_XS": BlockType(_codebook_format(32, IQ4_CODEBOOK), _iq4_xs),
    "TQ1_0": BlockType(_int_format(4, 128), _tq1_0),
    "TQ2_0": BlockType(_int_format(4, 128), _tq2_0),
    "MXFP4": BlockType(_codebook_format(32, E2M1_CODEBOOK), _mxfp4),
    "NVFP4": BlockType(_codebook_format(16, E2M1_CODEBOOK), _nvfp4),
    "IQ1_S": BlockType(_codebook_format(32, grids.codebook("IQ1")), _grid_type(grids.iq1_s)),
    "IQ1_M": BlockType(_codebook_format(16, grids.codebook("IQ1")), _iq1_m),
    "IQ2_XXS": BlockType(_codebook_format(32, grids.codebook("IQ2")), _grid_type(grids.iq2_xxs)),
    "IQ2_XS": BlockType(_codebook_format(16, grids.codebook("IQ2")), _grid_type(grids.iq2_xs)),
    "IQ2_S": BlockType(_codebook_format(16, grids.codebook("IQ2")), _grid_type(grids.iq2_s)),
    "IQ3_XXS": BlockType(_codebook_format(32, grids.codebook("IQ3_XXS")), _grid_type(grids.iq3_xxs)),
    "IQ3_S": BlockType(_codebook_format(32, grids.codebook("IQ3_S")), _grid_type(grids.iq3_s)),
}
