"""Layout of weights in a GPU's memory for quantized products, and the bytes that they take.

Eight bits lie as the specification has them. Four bits come in blocks of a row's inputs: byte i of a block holds input
i in its low bits and, in its high ones, the input half a block further: a kernel then reads activations as they lie.
Scales, zero points and minima have the specification's shape and lie group by group, as the tiles of a product read
them.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.interface.weights import WeightFormat
from quintet.ops.quantize import attributes, quantize

SCALES = {4: torch.float16, 8: torch.float32}  # by a weight's bits: half of one of 4's would be its scales otherwise
HALF, MIN_HALF = 64, 16  # bytes of a block; half of a group of 128, and what a step of a product takes at least
MAX_INPUTS = 131072  # of W8A8: its sums are of 32 bits
AT_A_TIME = 1 << 25  # numbers that are quantized together: their float32 copies are for a moment only


def pack(weight: Tensor, fmt: WeightFormat) -> dict[str, Tensor]:
    """[N, K] in floats, best on the device already -> "weight" and "scales" as their products take them.

    int8 and w8a8: int8 [N, K], int4 and w4a8: uint8 [N, blocks, 64 or 32]; scales [N, G]. ValueError where the form's
    group does not divide K, and for numbers that are not finite.
    """
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise ValueError(f"a weight is [outputs, inputs] in floats, not {tuple(weight.shape)} {weight.dtype}")
    outputs, inputs = weight.shape
    packed = torch.empty(_shape((outputs, inputs), fmt), dtype=_dtype(fmt), device=weight.device)
    scales = torch.empty((fmt.groups(inputs), outputs), dtype=SCALES[fmt.bits], device=weight.device).t()
    size = max(1, AT_A_TIME // inputs)
    for first in range(0, outputs, size):
        found = attributes(quantize(weight[first : first + size], fmt))
        values = found["weight"]
        packed[first : first + size] = values if fmt.bits == 8 else in_halves(values, packed.shape[2])
        scales[first : first + size] = found["scales"]
    if not bool(scales.isfinite().all()):
        raise ValueError(f"the weight holds numbers that are not finite, or too large for a scale in {scales.dtype}")
    return {"weight": packed, "scales": scales}


def pack_matrix(matrix: Mapping[str, Tensor], fmt: WeightFormat) -> dict[str, Tensor]:
    """The attributes of a canonical matrix, on the device already, as pack() lays them; scales stay in their type.

    Groups that no product of ours takes stay as they are.
    """
    values = matrix["weight"]
    by_group = {name: matrix[name].t().contiguous().t() for name in ("scales", "zeros", "mins") if name in matrix}
    return {**matrix, "weight": in_halves(values, _half(fmt)) if _in_halves(fmt) else values, **by_group}


def matrix_packed_bytes(shape: tuple[int, ...], fmt: WeightFormat) -> int:
    """Returns the bytes of pack_matrix()'s results for a matrix [N, K] of this shape."""
    outputs, inputs = shape
    spare = -inputs % (2 * _half(fmt)) if _in_halves(fmt) else 0
    return fmt.num_bytes((outputs, inputs)) + outputs * spare // 2


def fits_tiles(inputs: int, fmt: WeightFormat) -> bool:
    """True if no tile of our products cuts such a weight's groups: torch multiplies it."""
    return 0 < fmt.group & -fmt.group < MIN_HALF and fmt.groups(inputs) > 1


def packed_bytes(shape: tuple[int, ...], fmt: WeightFormat) -> int:
    """Returns the bytes of pack()'s results for a weight [N, K] of this shape; ValueError as there."""
    outputs, inputs = shape
    scales = fmt.groups(inputs) * outputs * SCALES[fmt.bits].itemsize
    return math.prod(_shape((outputs, inputs), fmt)) + scales


def _in_halves(fmt: WeightFormat) -> bool:
    return fmt.bits == 4 and _half(fmt) >= MIN_HALF


def in_halves(weight: Tensor, half: int) -> Tensor:
    """The specification's bytes [N, K / 2] -> [N, blocks, half], the last block filled up with what stands for 0."""
    inputs = weight.shape[1] * 2
    values = torch.stack([weight & 15, weight >> 4], -1).reshape(-1, inputs)
    values = torch.nn.functional.pad(values, (0, -inputs % (2 * half)), value=8).reshape(len(weight), -1, 2, half)
    return values[:, :, 0] | values[:, :, 1] << 4


def in_pairs(packed: Tensor, inputs: int) -> Tensor:
    """in_halves() undone: [N, blocks, half] -> the specification's bytes [N, K / 2]."""
    values = torch.cat([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, :inputs]
    return values[:, ::2] | values[:, 1::2] << 4


def _half(fmt: WeightFormat) -> int:
    """Bytes of a block: a half has one scale."""
    return min(HALF, fmt.group & -fmt.group) if fmt.group else HALF


def _dtype(fmt: WeightFormat) -> torch.dtype:
    return torch.int8 if fmt.bits == 8 else torch.uint8


def _shape(shape: tuple[int, int], fmt: WeightFormat) -> tuple[int, ...]:
    """Returns the shape of pack()'s weight."""
    outputs, inputs = shape
    if fmt.kind == "w8a8" and inputs > MAX_INPUTS:
        raise ValueError(f"{inputs} inputs of 8 bits are too many for sums of 32; {MAX_INPUTS} at most")
    if inputs % (fmt.group or inputs):
        raise ValueError(f"{inputs} inputs do not divide into groups of {fmt.group}")
    return (outputs, inputs) if fmt.bits == 8 else (outputs, -(-inputs // (2 * _half(fmt))), _half(fmt))
