"""Products with quantized weights by quintet._cpu: integers, so that every instruction set gives the same bits.

Activations that a scheme leaves as they are become 16-bit integers, each group of a token with a scale of its own: to
2^-15 of the group's largest. That is finer than what bfloat16 and float16 hold, and coarser than float32.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.ops.quantized import dequantized, fake_quantized_activations
from quintet.platforms.cpu.arena import empty, empty_weight
from quintet.platforms.cpu.ops import torch_ops as ops  # noqa: F401  registers torch's product
from quintet.platforms.cpu.ops.extension import KINDS, dense_operands, extension
from quintet.platforms.cpu.weight_layout import (
    COLUMNS,
    PACKED_KINDS,
    POWERS,
    TABLE4,
    TABLE4_A8,
    has_two_level_scales,
    kernel_number,
    packed_format,
    scale_type,
    shapes,
    stored_table,
)


def pack(weight: Tensor, fmt: WeightFormat) -> dict[str, Tensor]:
    """[N, K] in floats -> "weight" uint8 [blocks, ceil(K / 4), 256 or 128] and "scales" [blocks, G, 64].

    The weight may be a memory map. ValueError where the form's group does not divide K, and for numbers that are not
    finite.
    """
    if weight.dim() != 2 or 0 in weight.shape or weight.dtype not in KINDS:
        raise ValueError(f"a weight is [outputs, inputs] in floats of 16 or 32 bits, not {_describe(weight)}")
    if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
        weight = weight.contiguous()
    (outputs, inputs), number = weight.shape, kernel_number(fmt)
    packed_shape, scales_shape = shapes(outputs, inputs, fmt)
    packed = empty_weight(packed_shape, torch.uint8)
    scales = torch.empty(scales_shape, dtype=scale_type(number))
    sizes = outputs, inputs, scales_shape[1], weight.stride(0)
    places = packed.data_ptr(), scales.data_ptr(), weight.data_ptr()
    if not extension().pack_quantized(number, KINDS[weight.dtype], *places, *sizes):
        raise ValueError("the weight holds numbers that are not finite, or too large for a scale in float16")
    return {"weight": packed, "scales": scales}


@functools.cache
def probe() -> str | None:
    """32 inputs, two outputs, by every format."""
    try:
        from quintet import _cpu
    except ImportError as error:
        return f"the compiled extension is not there: {error}"
    if not hasattr(_cpu, "lay_blocks"):
        return "the compiled extension is older than this provider; build it again with `make`"
    x, weight = torch.zeros(1, 32), torch.zeros(2, 32)
    x[0, 5], x[0, 7], weight[0, 5], weight[1, 7] = 1.0, -1.0, 3.0, 2.0
    for name in ("int8", "int4", "w8a8", "w4a8"):
        fmt = WeightFormat(name, 4 if "4" in name else 8, 8 if "a8" in name else 16, 0 if name == "w8a8" else 32)
        packed = pack(weight, fmt)
        got = _product(x, Matrix(packed["weight"], packed["scales"], format=fmt), None, (2,))
        if not torch.allclose(got, torch.tensor([[3.0, -2.0]]), rtol=0.02):
            return f"a product by {name} gave {got.tolist()}, not [[3.0, -2.0]]"
    return None


@linear.provide("native", probe, kinds=PACKED_KINDS)
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """A weight of two dimensions was not packed."""
    if weight.values.dim() == 2 or weight.scales is None:
        return by_torch(x, weight, bias, outputs)
    return _product(x, weight, bias, outputs)


def by_torch(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """The reference's product with what was not packed, a row's bits the same whatever rows stand beside it."""
    dtype, shifted = x.dtype, weight.zeros is not None or weight.mins is not None or bool(weight.format.codebook)
    if weight.format.activations == 8 and not shifted:  # sums of whole numbers
        plain: Tensor = linear.reference(x, weight, bias, outputs)
        return plain
    if weight.format.activations == 8:
        x, weight = fake_quantized_activations(x, weight), weight._replace(input_order=None)
    bias = None if bias is None else bias.float()
    y: Tensor = linear.providers["torch"](x.float(), Matrix(dequantized(weight)), bias, outputs)
    return y.to(dtype)


def _product(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    packed, scales = weight.values, weight.scales
    assert scales is not None
    count, (tokens, inputs), dtype = sum(outputs), x.shape, x.dtype
    known = product_arguments(weight.format, inputs)
    blocks = len(packed)
    if (
        packed.shape[1:] != known.packed
        or not (blocks - 1) * COLUMNS < count <= blocks * COLUMNS
        or scales.dtype != known.scale
        or scales.shape[1] not in (known.rows, known.rows + POWERS)
    ):
        raise ValueError(
            f"x {_describe(x)} and {count} outputs do not fit a packed weight {_describe(packed)} "
            f"with scales {_describe(scales)}"
        )
    x, bias = dense_operands(x, bias, count)
    out = empty((tokens, count), dtype)
    extension().quantized(
        known.number, KINDS[dtype], out.data_ptr(), x.data_ptr(), x.stride(0), packed.data_ptr(), scales.data_ptr(),
        _address(bias), tokens, inputs, count, known.groups, _address(weight.zeros), _address(weight.mins),
        _address(weight.input_order), known.span, scales.shape[1] > known.rows, _address(known.table),
    )  # fmt: skip
    return out


class ProductArguments(NamedTuple):
    """Kernel arguments that products with matrices of a format and so many inputs share."""

    number: int
    packed: tuple[int, int]  # of a block
    groups: int
    rows: int  # of a block's scales; its powers of two may follow
    scale: torch.dtype
    span: int  # inputs that share a scale of the row; 0: a group
    table: Tensor | None  # uint8 [16]


@functools.cache
def product_arguments(fmt: WeightFormat, inputs: int) -> ProductArguments:
    """Looked up in each step."""
    number, own = kernel_number(fmt), packed_format(fmt, inputs)
    (_, *packed), (_, rows, _) = shapes(1, inputs, own)
    groups = inputs // own.group if has_two_level_scales(own) else rows
    span = (fmt.group or inputs) if fmt.activations == 8 else 0
    table = stored_table(fmt) if number in (TABLE4, TABLE4_A8) else None
    return ProductArguments(number, (packed[0], packed[1]), groups, rows, scale_type(number), span, table)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
