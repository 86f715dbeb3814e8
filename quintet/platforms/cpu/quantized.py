"""Products with quantized weights by quintet._cpu: integers, so that every instruction set gives the same bits.

Activations that a scheme leaves as they are become 16-bit integers, each group of a token with a scale of its own: to
2^-15 of the group's largest. That is finer than what bfloat16 and float16 hold, and coarser than float32.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.linear import linear
from quintet.ops.quantized import unpacked
from quintet.platforms.cpu.arena import empty, lasting
from quintet.platforms.cpu.native import KINDS, extension, fitting
from quintet.weights import Form, Matrix

INT8, INT4, W8A8, W4A8 = range(4)  # as csrc/cpu/kernels/quantized.h numbers them
NUMBERS = {"int8": INT8, "int4": INT4, "w8a8": W8A8, "w4a8": W4A8}
SCALES = {W8A8: torch.float32}  # the others': float16
GROUPS = (128, 64, 32, 16)  # inputs that may share a scale
MOST_GROUP = GROUPS[0]
COLUMNS, QUAD = 64, 4  # outputs in a block; inputs that stand side by side
MOST_INPUTS = 131072  # of W8A8, whose sums are of 32 bits


def pack(weight: Tensor, form: Form) -> dict[str, Tensor]:
    """[N, K] in floats -> "weight" uint8 [blocks, ceil(K / 4), 256 or 128] and "scales" [blocks, G, 64].

    The weight may be a memory map. ValueError where the form's group does not divide K, and for numbers that are not
    finite.
    """
    if weight.dim() != 2 or 0 in weight.shape or weight.dtype not in KINDS:
        raise ValueError(f"a weight is [outputs, inputs] in floats of 16 or 32 bits, not {_described(weight)}")
    if weight.stride(1) != 1 or weight.stride(0) < weight.shape[1]:
        weight = weight.contiguous()
    (outputs, inputs), number = weight.shape, NUMBERS[form.kind]
    packed_shape, scales_shape = _shapes(outputs, inputs, form)
    packed = lasting(packed_shape, torch.uint8)
    scales = torch.empty(scales_shape, dtype=SCALES.get(number, torch.float16))
    sizes = outputs, inputs, scales_shape[1], weight.stride(0)
    places = packed.data_ptr(), scales.data_ptr(), weight.data_ptr()
    if not extension().pack_quantized(number, KINDS[weight.dtype], *places, *sizes):
        raise ValueError("the weight holds numbers that are not finite, or too large for a scale in float16")
    return {"weight": packed, "scales": scales}


def laid(matrix: Matrix) -> dict[str, Tensor]:
    """A canonical matrix as pack() lays it; ValueError where that would round its scales.

    4 bits with zero points become 8: value - zero is -15..15, and nothing is rounded.
    """
    form, scales = held(matrix.form, matrix.values.shape[1] * 8 // matrix.form.bits), matrix.scales
    assert scales is not None and matrix.order is None, "products here take scales, and inputs as they come"
    values = unpacked(matrix).to(torch.int16)
    outputs, inputs = values.shape
    if matrix.zeros is not None and matrix.zeros.is_floating_point():
        raise ValueError("its zero points are no whole numbers")
    if matrix.zeros is not None:
        values -= matrix.zeros.to(torch.int16).repeat_interleave(inputs // scales.shape[1], 1)
    packed_shape, scales_shape = _shapes(outputs, inputs, form)
    (blocks, quads, _), kind = packed_shape, SCALES.get(NUMBERS[form.kind], torch.float16)
    scales = scales.repeat_interleave(scales_shape[1] // scales.shape[1], 1)
    if bool(((scales.to(kind).float() - scales).abs() > scales.abs() * 2**-10).any()):
        raise ValueError("its scales are too large or too small for float16")
    offset = 8 if form.bits == 4 else 128
    whole = functional.pad(values + offset, (0, quads * QUAD - inputs, 0, blocks * COLUMNS - outputs), value=offset)
    columns = whole.to(torch.uint8).reshape(blocks, COLUMNS, quads, QUAD).transpose(1, 2)
    if form.bits == 4:
        low, high = columns.reshape(blocks, quads, 2, 2, 16, QUAD).unbind(3)
        columns = low | high << 4
    wide = functional.pad(scales, (0, 0, 0, blocks * COLUMNS - outputs)).to(kind).reshape(blocks, COLUMNS, -1)
    packed = lasting(packed_shape, torch.uint8).copy_(columns.reshape(packed_shape))
    return {"weight": packed, "scales": wide.transpose(1, 2).contiguous()}


def held(form: Form, inputs: int) -> Form:
    """What laid() makes of a canonical matrix of the form: groups that its products can add up."""
    if form.zeros:
        form = Form("int8", 8, 16, form.group)
    if form.kind == "w8a8" or 0 < form.group <= MOST_GROUP:
        return form
    return replace(form, group=next((size for size in GROUPS if (form.group or inputs) % size == 0), inputs))


def packed_bytes(shape: tuple[int, ...], form: Form) -> int:
    """Of pack()'s results for a weight [N, K] of this shape, or of laid()'s where there are zero points."""
    outputs, inputs = shape
    form = held(form, inputs)
    packed, scales = _shapes(outputs, inputs, form)
    return math.prod(packed) + math.prod(scales) * SCALES.get(NUMBERS[form.kind], torch.float16).itemsize


def unpack(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """pack()'s results -> [outputs, inputs] in float32: what they stand for."""
    whole, each = integers(packed, outputs, inputs), columns(scales, outputs)
    return whole.float() * each.repeat_interleave(inputs // each.shape[1], 1)


def integers(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """pack()'s weight -> int8 [outputs, inputs]."""
    blocks, quads, width = packed.shape
    if width == COLUMNS * QUAD // 2:  # a byte: the same place of two stretches of 16 columns
        halves = packed.reshape(blocks, quads, 2, 1, 16, QUAD)
        packed, offset = torch.cat([halves & 15, halves >> 4], 3), 8
    else:
        offset = 128
    whole = packed.reshape(blocks, quads, COLUMNS, QUAD).permute(0, 2, 1, 3).reshape(-1, quads * QUAD)
    return (whole[:outputs, :inputs].to(torch.int16) - offset).to(torch.int8)


def columns(scales: Tensor, outputs: int) -> Tensor:
    """pack()'s scales -> float32 [outputs, G]."""
    return scales.permute(0, 2, 1).reshape(-1, scales.shape[1])[:outputs].float()


def rows(weight: Tensor, scales: Tensor | None, ids: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows ids [T] (int32) of a packed weight [outputs, inputs] -> [T, inputs] in `dtype`, as an embedding does.

    The weight is pack()'s with 8 bits, or without scales linear.pack()'s in `dtype`. An id that is no row gives zeros.
    """
    plain = scales is None
    number = W8A8 if scales is not None and scales.dtype == torch.float32 else INT8
    if plain and weight.dtype != dtype or not plain and weight.shape[2] != COLUMNS * QUAD:
        raise ValueError(f"rows in {dtype} are not to be had of {_described(weight)}; 8 bits or {dtype} would do")
    if (
        ids.dtype != torch.int32
        or not ids.is_contiguous()
        or not (len(weight) - 1) * COLUMNS < outputs <= len(weight) * COLUMNS
    ):
        raise ValueError(f"ids {_described(ids)} of {outputs} rows do not fit {_described(weight)}; ids are int32")
    out = empty((len(ids), inputs), dtype)
    at, groups = (0, 1) if scales is None else (scales.data_ptr(), scales.shape[1])
    places = out.data_ptr(), ids.data_ptr(), weight.data_ptr(), at
    extension().gather(number, KINDS[dtype], *places, len(ids), inputs, outputs, groups)
    return out


def probe() -> str | None:
    """32 inputs, two outputs, by every form."""
    try:
        from quintet import _cpu
    except ImportError as error:
        return f"the compiled extension is not there: {error}"
    if not hasattr(_cpu, "quantized"):
        return "the compiled extension is older than this provider; build it again with `make`"
    x, weight = torch.zeros(1, 32), torch.zeros(2, 32)
    x[0, 5], x[0, 7], weight[0, 5], weight[1, 7] = 1.0, -1.0, 3.0, 2.0
    for name, number in NUMBERS.items():
        packed = pack(weight, Form(name, 4 if "4" in name else 8, 16, 0 if name == "w8a8" else 32))
        got = _product(number, x, packed["weight"], packed["scales"], None, (2,))
        if not torch.allclose(got, torch.tensor([[3.0, -2.0]]), rtol=0.02):
            return f"a product by {name} gave {got.tolist()}, not [[3.0, -2.0]]"
    return None


@linear.provide("native", probe, forms=tuple(NUMBERS))
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """A weight of two dimensions was not packed, and goes to the reference."""
    packed, scales, form = weight.values, weight.scales, weight.form
    if packed.dim() == 2 or scales is None:
        plain: Tensor = linear.reference(x, weight, bias, outputs)
        return plain
    number = INT8 if form.zeros else NUMBERS[form.kind]  # see laid()
    return _product(number, x, packed, scales, bias, outputs)


def _product(
    number: int, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: tuple[int, ...]
) -> Tensor:
    count = sum(outputs)
    tokens, inputs = x.shape
    dtype = x.dtype
    blocks, groups, _ = scales.shape
    width = COLUMNS * QUAD // 2 if number in (INT4, W4A8) else COLUMNS * QUAD
    if (
        weight.shape != (blocks, (inputs + QUAD - 1) // QUAD, width)
        or not (blocks - 1) * COLUMNS < count <= blocks * COLUMNS
        or scales.dtype != SCALES.get(number, torch.float16)
    ):
        raise ValueError(
            f"x {_described(x)} and {count} outputs do not fit a packed weight {_described(weight)} "
            f"with scales {_described(scales)}"
        )
    x, bias = fitting(x, bias, count)
    at_bias = 0 if bias is None else bias.data_ptr()
    out = empty((tokens, count), dtype)
    extension().quantized(
        number, KINDS[dtype], out.data_ptr(), x.data_ptr(), x.stride(0), weight.data_ptr(), scales.data_ptr(), at_bias,
        tokens, inputs, count, groups,
    )  # fmt: skip
    return out


def _shapes(outputs: int, inputs: int, form: Form) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of pack()'s weight and scales."""
    blocks, width = -(-outputs // COLUMNS), COLUMNS * QUAD * form.bits // 8
    if NUMBERS[form.kind] == W8A8:
        if inputs > MOST_INPUTS:
            raise ValueError(f"{inputs} inputs of 8 bits are too many for sums of 32; {MOST_INPUTS} at most")
        groups = 1
    else:
        group = form.group or inputs
        if inputs % group or group > MOST_GROUP:
            raise ValueError(f"{inputs} inputs do not divide into groups of {group}, {MOST_GROUP} at most")
        groups = inputs // group
    return (blocks, -(-inputs // QUAD), width), (blocks, groups, COLUMNS)


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
