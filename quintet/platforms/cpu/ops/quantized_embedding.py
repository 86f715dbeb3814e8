"""Rows by number out of weights that lie as products read them, by quintet._cpu: a tied table is held once."""

import functools

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.embedding import quantized_embedding
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops import float8
from quintet.platforms.cpu.ops.extension import KINDS, extension, indices, kind_of, missing
from quintet.platforms.cpu.ops.quantized import product_arguments
from quintet.platforms.cpu.weight_layout import COLUMNS, POWERS

Shape = tuple[int, int]  # rows, and numbers of each


def plain_rows(weight: Tensor, ids: Tensor, shape: Shape) -> Tensor:
    """Rows ids [T] (int32) of linear.pack()'s result for a weight of this shape -> [T, inputs] in its type. An id that
    is no row gives zeros."""
    if not _covers(weight, shape[0]) or weight.dtype not in KINDS:
        raise ValueError(f"a packed weight {_describe(weight)} has no {shape[0]} rows in floats")
    out = empty((len(ids), shape[1]), weight.dtype)
    places = out.data_ptr(), indices(ids), weight.data_ptr(), 0
    extension().gather(0, KINDS[weight.dtype], *places, len(ids), shape[1], shape[0], 1)
    return out


@functools.cache
def probe() -> str | None:
    """The second row of two, in 4 bits and in 8-bit floats."""
    if reason := missing("gather_float8"):
        return reason
    numbers, ids = torch.tensor([[1.0] * 16, [-2.0] * 16]), torch.ones(1, dtype=torch.int32)
    four, wide = WeightFormat("int4", 4, 16, 16), WeightFormat("fp8", 8, dtype=torch.float8_e4m3fn)
    halves, whole = torch.ones(2, 1) / 2, (numbers * 2 + 8).to(torch.uint8)
    given = (
        Matrix(whole[:, ::2] | whole[:, 1::2] << 4, halves, format=four),
        Matrix((2 * numbers).to(wide.dtype), halves),
    )
    for laid, fmt in ((tiles.pack(given[0]), four), (float8.pack(given[1]._replace(format=wide)), wide)):
        table = Matrix(laid["weight"], laid["scales"], format=fmt)
        got = _embedding(ids, table, 0, (2, 16), torch.float32)
        if not torch.equal(got, numbers[1:]):
            return f"sixteen times -2 by {fmt.kind} came out as {got.tolist()}"
    return None


@quantized_embedding.provide("native", probe)
def _embedding(ids: Tensor, weight: Matrix, first: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """A weight of two dimensions was not packed, and goes to the specification."""
    if weight.values.dim() == 2 or weight.scales is None:
        plain: Tensor = quantized_embedding.reference(ids, weight, first, shape, dtype)
        return plain
    out, at = empty((len(ids), shape[1]), dtype), indices(ids)
    if weight.format.dtype is not None:
        _float8(out, at, weight, first, shape)
        return out
    values, scales, known = weight.values, weight.scales, product_arguments(weight.format, shape[1])
    powers = scales.shape[1] > known.rows
    held = known.rows, known.rows + POWERS
    fits = values.shape[1:] == known.packed and scales.dtype == known.scale and scales.shape[1] in held
    if not fits or not _covers(values, shape[0]):
        raise ValueError(f"a table {shape} is not {_describe(values)} with scales {_describe(scales)}")
    extension().gather(
        known.number,
        kind_of(dtype),
        out.data_ptr(),
        at,
        values.data_ptr(),
        scales.data_ptr(),
        len(ids),
        shape[1],
        shape[0],
        known.groups,
        first,
        _address(weight.zeros),
        _address(weight.mins),
        _address(weight.input_order),
        powers,
        _address(known.table),
    )
    return out


def _float8(out: Tensor, ids: int, weight: Matrix, first: int, shape: Shape) -> None:
    fmt, (rows, width) = weight.format, shape
    assert fmt.dtype is not None and weight.scales is not None
    float8.check_packed(weight.values, weight.scales, fmt, rows, width)
    places = out.data_ptr(), ids, weight.values.data_ptr(), weight.scales.data_ptr()
    sizes = len(out), width, rows, float8.inputs_per_scale(fmt, width)
    extension().gather_float8(float8.FORMATS[fmt.dtype], kind_of(out.dtype), *places, *sizes, first)


def _covers(packed: Tensor, rows: int) -> bool:
    return packed.dim() == 3 and (len(packed) - 1) * COLUMNS < rows <= len(packed) * COLUMNS


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
