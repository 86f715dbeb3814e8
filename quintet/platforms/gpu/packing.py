"""How weights lie in a GPU's memory for quantized products, and what they take.

Eight bits lie as the specification has them. Four bits come in blocks of a row's inputs: byte i of a block holds input
i in its low bits and, in its high ones, the input half a block further: a kernel then reads activations as they lie.
Scales have the specification's shape and lie group by group, as the tiles of a product read them.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from quintet.ops.quantize import quantize
from quintet.types import Scheme

SCALES = {4: torch.float16, 8: torch.float32}  # by a weight's bits: half of one of 4's would be its scales otherwise
GROUPS = (128, 64, 32)
HALF = 64  # bytes of a block; half of a group of 128
MOST_INPUTS = 131072  # of W8A8, whose sums are of 32 bits
AT_A_TIME = 1 << 25  # numbers that are quantized together: their float32 copies are for a moment only


def pack(weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """[N, K] in floats, best on the device already -> "weight" and "scales" as multiplied by linear_<scheme>.

    int8 and w8a8: int8 [N, K], int4 and w4a8: uint8 [N, blocks, 64 or 32]; scales [N, G]. Where the scheme's group does
    not divide K, a smaller one is taken: ValueError where there is none, and for numbers that are not finite.
    """
    if weight.dim() != 2 or 0 in weight.shape or not weight.is_floating_point():
        raise ValueError(f"a weight is [outputs, inputs] in floats, not {tuple(weight.shape)} {weight.dtype}")
    (outputs, inputs), group = weight.shape, group_of(weight.shape[1], scheme)
    own = replace(scheme, group=0 if group == inputs else group)
    shape, groups = _shapes((outputs, inputs), scheme)
    packed = torch.empty(shape, dtype=torch.int8 if scheme.bits == 8 else torch.uint8, device=weight.device)
    scales = torch.empty((groups, outputs), dtype=SCALES[scheme.bits], device=weight.device).t()
    size = max(1, AT_A_TIME // inputs)
    for first in range(0, outputs, size):
        values, found = quantize(weight[first : first + size], own)
        packed[first : first + size] = values if scheme.bits == 8 else in_halves(values, shape[2])
        scales[first : first + size] = found
    if not bool(scales.isfinite().all()):
        raise ValueError(f"the weight holds numbers that are not finite, or too large for a scale in {scales.dtype}")
    return {"weight": packed, "scales": scales}


def packed_bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    """Of pack()'s results for a weight [N, K] of this shape; ValueError as there."""
    outputs, inputs = shape
    packed, groups = _shapes((outputs, inputs), scheme)
    return math.prod(packed) + groups * outputs * SCALES[scheme.bits].itemsize


def group_of(inputs: int, scheme: Scheme) -> int:
    """Inputs that share a scale: the scheme's group, or the next smaller one that divides them."""
    if scheme.activations == 8 and scheme.bits == 8 and inputs > MOST_INPUTS:
        raise ValueError(f"{inputs} inputs of 8 bits are too many for sums of 32; {MOST_INPUTS} at most")
    if scheme.group == 0:
        return inputs
    group = next((size for size in GROUPS if size <= scheme.group and inputs % size == 0), None)
    if group is None:
        raise ValueError(f"{inputs} inputs do not divide into groups of {scheme.group} or of fewer, down to 32")
    return group


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


def _shapes(shape: tuple[int, int], scheme: Scheme) -> tuple[tuple[int, ...], int]:
    """Of pack()'s weight, and how many groups a row has."""
    outputs, inputs = shape
    group = group_of(inputs, scheme)
    if scheme.bits == 8:
        return (outputs, inputs), inputs // group
    half = 32 if group == 32 else HALF  # a half has one scale
    return (outputs, -(-inputs // (2 * half)), half), inputs // group
