"""Products with weights in 8-bit floats by quintet._cpu: they stay so, and are widened while they are multiplied.

What 8 bits hold, bfloat16 holds exactly, so that activations are multiplied as they are; a group's sum meets its scale
in float32. Every output is computed in one order, whatever rows stand beside its own.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.platforms.cpu.arena import empty, empty_weight
from quintet.platforms.cpu.ops.extension import KINDS, dense_operands, extension, missing
from quintet.platforms.cpu.ops.quantized import by_torch

FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # as csrc/cpu/kernels/float8.h numbers them
COLUMNS, STEP = 64, 128  # outputs in a block; bytes of a pair of inputs for all of them


def pack(matrix: Matrix) -> dict[str, Tensor]:
    """A canonical matrix -> "weight" uint8 [blocks, ceil(K / 2), 128] and "scales" float32 [blocks, G, 64].

    The values may be a memory map. ValueError for numbers or scales that are not finite, and for groups of an odd size.
    """
    fmt, values, scales = matrix.format, matrix.values, matrix.scales
    assert scales is not None and matrix.input_order is None and matrix.mins is None, "8-bit floats have scales alone"
    if values.dtype not in FORMATS:
        raise ValueError(f"8-bit floats are {', '.join(map(str, FORMATS))} here, not {values.dtype}")
    (outputs, inputs), group = values.shape, fmt.group
    if group % 2 and group < inputs:
        raise ValueError(f"groups of {group} inputs share scales, which cuts the pairs that are multiplied at once")
    if values.stride(1) != 1 or values.stride(0) < inputs:
        values = values.contiguous()
    packed_shape, scales_shape = _shapes(outputs, inputs, fmt)
    packed = empty_weight(packed_shape, torch.uint8)
    sizes = outputs, inputs, values.stride(0)
    if not extension().pack_float8(FORMATS[values.dtype], packed.data_ptr(), values.data_ptr(), *sizes):
        raise ValueError("it holds numbers that are not finite")
    if not bool(scales.isfinite().all()):
        raise ValueError("its scales are not finite")
    wide = functional.pad(scales.float(), (0, 0, 0, packed_shape[0] * COLUMNS - outputs))
    return {"weight": packed, "scales": wide.reshape(-1, COLUMNS, scales_shape[1]).transpose(1, 2).contiguous()}


def can_pack(fmt: WeightFormat, inputs: int) -> bool:
    """True if pack() takes matrices of the format, with so many inputs."""
    return fmt.dtype in FORMATS and (fmt.group % 2 == 0 or fmt.group >= inputs)


def inputs_per_scale(fmt: WeightFormat, inputs: int) -> int:
    """Inputs that share scales, as products count them."""
    return min(fmt.group or inputs, inputs)


def packed_bytes(shape: tuple[int, ...], fmt: WeightFormat) -> int:
    """Returns the bytes of pack()'s results for a weight [N, K] of this shape."""
    outputs, inputs = shape
    packed, scales = _shapes(outputs, inputs, fmt)
    return math.prod(packed) + math.prod(scales) * torch.float32.itemsize


def unpack(packed: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """pack()'s weight -> the values [outputs, inputs] in their `dtype`."""
    blocks, depth, _ = packed.shape
    pairs = packed.reshape(blocks, depth, 2, 16, 2, 2).flip(-1).permute(0, 2, 5, 3, 1, 4)  # see kFloat8Step
    return pairs.reshape(blocks * COLUMNS, depth * 2)[:outputs, :inputs].contiguous().view(dtype)


@functools.cache
def probe() -> str | None:
    """33 inputs, two outputs, in both formats."""
    if reason := missing("float8"):
        return reason
    x, weight = torch.zeros(1, 33), torch.zeros(2, 33)
    x[0, 5], x[0, 32], weight[0, 5], weight[1, 32] = 1.0, -1.0, 3.0, 0.5
    for kind in FORMATS:
        fmt = WeightFormat("fp8", 8, 16, 32, dtype=kind)
        packed = pack(Matrix(weight.to(kind), torch.full((2, 2), 4.0), format=fmt))
        got = _linear(x, Matrix(packed["weight"], packed["scales"], format=fmt), None, (2,)).tolist()
        if got != [[12.0, -2.0]]:
            return f"a product with {kind} gave {got}, not [[12.0, -2.0]]"
    return None


@linear.provide("native", probe, kinds=("fp8",))
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """A weight of two dimensions was not packed."""
    packed, scales, fmt = weight.values, weight.scales, weight.format
    if packed.dim() == 2 or scales is None or fmt.dtype is None:
        return by_torch(x, weight, bias, outputs)
    (tokens, inputs), count, dtype = x.shape, sum(outputs), x.dtype
    check_packed(packed, scales, fmt, count, inputs)
    x, bias = dense_operands(x, bias, count)
    out = empty((tokens, count), dtype)
    extension().float8(
        FORMATS[fmt.dtype], KINDS[dtype], out.data_ptr(), x.data_ptr(), x.stride(0), packed.data_ptr(),
        scales.data_ptr(), 0 if bias is None else bias.data_ptr(), tokens, inputs, count, inputs_per_scale(fmt, inputs),
    )  # fmt: skip
    return out


def check_packed(packed: Tensor, scales: Tensor, fmt: WeightFormat, outputs: int, inputs: int) -> None:
    """ValueError where these are not pack()'s of a weight [outputs, inputs]."""
    there = tuple(packed.shape), tuple(scales.shape)
    if there != _shapes(outputs, inputs, fmt) or packed.dtype != torch.uint8 or scales.dtype != torch.float32:
        raise ValueError(
            f"{inputs} inputs and {outputs} outputs do not fit a packed weight {there[0]} {packed.dtype} with scales "
            f"{there[1]} {scales.dtype} for groups of {fmt.group}"
        )


def _shapes(outputs: int, inputs: int, fmt: WeightFormat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of pack()'s weight and scales."""
    blocks = -(-outputs // COLUMNS)
    return (blocks, -(-inputs // 2), STEP), (blocks, fmt.groups(inputs), COLUMNS)
