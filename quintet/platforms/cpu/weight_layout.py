"""Layout of quantized weights, as quintet._cpu reads them: blocks of 64 outputs, their scales, and what is beside."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix, WeightFormat
from quintet.platforms.cpu.arena import empty_weight
from quintet.platforms.cpu.ops.extension import extension

# as csrc/cpu/kernels/quantized.h numbers them
INT8, INT4, W8A8, W4A8, W8A8_GROUPS, TABLE4, TABLE4_A8 = range(7)
INT4_LEVELS, W4A8_LEVELS, INT6_LEVELS, W6A8_LEVELS, INT5, W5A8 = range(7, 13)
PACKED_KINDS = ("int8", "int4", "w8a8", "w4a8", "table4", "table8")  # kinds of formats
GROUPS = (128, 64, 32, 16)  # inputs that may share a scale
MAX_GROUP, MIN_GROUP = GROUPS[0], GROUPS[-1]
COLUMNS, QUAD = 64, 4  # outputs in a block; inputs that stand side by side
MAX_INPUTS = 131072  # of W8A8: its sums are of 32 bits
POWERS = 2  # rows of 64 halves after pack()'s scales of a block: the columns' powers of two in float32
# Block types with scales and minima that stay whole numbers, times one that so many inputs share -> bits of a value.
LEVELS, LEVEL_INPUTS = {"Q2_K": 4, "Q3_K": 4, "Q4_K": 4, "Q5_K": 6, "Q6_K": 6}, 256
# All block types that are laid as their blocks say -> bits of a value.
LAID = {**LEVELS, "Q5_0": 5}
LARGEST = 127  # of a table's numbers, once they are whole
NOT_FINITE = 2  # lay_scales() says of them


def pack(matrix: Matrix, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A canonical matrix as pack() lays it, its whole numbers exactly. ValueError for scales that are not finite.
    `into`: memory for "weight" and "scales", such as the blocks of a larger weight.

    Beside weight and scales: "zeros" uint8 and "mins" float16 [blocks, G, 64], "order" int32 [K]. Scales and minima are
    held in float16, to one part in 2048. They are followed by their columns' powers of two, 1 but where float16 is too
    narrow: always, so that other numbers go where these are. Numbers of a table become whole ones, see whole_table().
    """
    matrix = _centred(matrix)
    assert matrix.scales is not None, "what is quantized has scales"
    outputs, inputs = len(matrix.values), matrix.values.shape[1] * 8 // matrix.format.bits
    fmt = packed_format(matrix.format, inputs)
    packed_shape, scales_shape = shapes(outputs, inputs, fmt)
    values, into = matrix.values.contiguous(), into or {}
    packed = into["weight"] if into else empty_weight(packed_shape, torch.uint8)
    bytes_of = _bytes_of(matrix.format)
    places = packed.data_ptr(), values.data_ptr(), bytes_of.data_ptr()
    extension().lay_quantized(*places, outputs, inputs, fmt.bits == 4)
    found, scales = {"weight": packed}, matrix.scales.float()
    if fmt.codebook:
        scales = scales * integer_table(fmt.codebook)[1]
    zeros, mins = _offsets(matrix)
    if zeros is not None:
        found["zeros"] = _blocks(zeros, scales_shape)
    if kernel_number(fmt) == W8A8:
        found["scales"] = _blocks(_finite(scales), scales_shape)
    else:
        found |= _scales(scales, mins, scales_shape, into.get("scales"))
    return found if matrix.input_order is None else {**found, "order": matrix.input_order.int().contiguous()}


def empty_packed(outputs: int, inputs: int, fmt: WeightFormat) -> dict[str, Tensor]:
    """Returns memory for pack()'s "weight" and "scales" of a format whose products take scales in float16."""
    packed, (blocks, groups, _) = shapes(outputs, inputs, packed_format(fmt, inputs))
    scales = empty_weight((blocks, groups + POWERS, COLUMNS), torch.float16)
    return {"weight": empty_weight(packed, torch.uint8), "scales": scales}


def has_two_level_scales(fmt: WeightFormat) -> bool:
    """True if its products read scales of two levels: rows of int8, then of float16 for each LEVEL_INPUTS."""
    return fmt.block_type in LEVELS


def is_laid(fmt: WeightFormat) -> bool:
    """True if its blocks are laid as they are: no canonical matrix of it is packed."""
    return fmt.block_type in LAID


def packed_format(fmt: WeightFormat, inputs: int) -> WeightFormat:
    """Returns the format that pack() gives a canonical matrix: groups that its products can add up."""
    if kernel_number(fmt) == W8A8 or 0 < fmt.group <= MAX_GROUP:
        return fmt
    return replace(fmt, group=next((size for size in GROUPS if (fmt.group or inputs) % size == 0), inputs))


def can_pack(fmt: WeightFormat, inputs: int) -> bool:
    """True if pack() takes a matrix of the format: its groups are of whole vectors."""
    if kernel_number(fmt) == W8A8:
        return inputs <= MAX_INPUTS
    if has_two_level_scales(fmt):
        return inputs % LEVEL_INPUTS == 0
    group = packed_format(fmt, inputs).group
    if fmt.group and inputs % fmt.group:  # its last group is short, and pieces of the others would not fit it
        return False
    return inputs % group == 0 and group % MIN_GROUP == 0 and group <= MAX_GROUP


def packed_bytes(shape: tuple[int, ...], fmt: WeightFormat, powers: bool = True) -> int:
    """Returns the bytes of pack()'s results for a weight [N, K] of this shape; without powers of two, of pack()'s."""
    outputs, inputs = shape
    fmt = packed_format(fmt, inputs)
    packed, scales = (math.prod(each) for each in shapes(outputs, inputs, fmt))
    if has_two_level_scales(fmt):
        return packed + scales * (1 + fmt.mins)
    each = scale_type(kernel_number(fmt)).itemsize + fmt.zeros + 2 * fmt.mins
    powers = powers and kernel_number(fmt) != W8A8 and not is_laid(fmt)
    beside = -(-outputs // COLUMNS) * COLUMNS * 4 if powers else 0
    return packed + scales * each + beside + 4 * inputs * fmt.act_order


def kernel_number(fmt: WeightFormat) -> int:
    """Returns the number of the products that take a matrix of the format."""
    few = fmt.activations == 8
    if has_two_level_scales(fmt):
        numbers = (INT4_LEVELS, W4A8_LEVELS) if LEVELS[fmt.block_type] == 4 else (INT6_LEVELS, W6A8_LEVELS)
        return numbers[few]
    if is_laid(fmt):
        return W5A8 if few else INT5
    if fmt.bits == 4:
        return (TABLE4_A8 if few else TABLE4) if fmt.codebook else W4A8 if few else INT4
    if not few:
        return INT8
    return W8A8_GROUPS if fmt.group or fmt.mins else W8A8


@functools.cache
def integer_table(table: tuple[float, ...]) -> tuple[Tensor, float]:
    """int8 [C], and what stands for 1 in them. Exact where all are whole multiples of a step (e2m1, e2m3, IQ4_NL),
    otherwise to less than a 127th of the largest: nf4 is off by 0.4% of it at most, 0.17% in the mean."""
    numbers = torch.tensor(table, dtype=torch.float64)
    largest = numbers.abs().max().item() or 1.0
    for whole in range(1, LARGEST + 1):
        exact = numbers * (whole / largest)
        if bool(((exact - exact.round()).abs() < 1e-6).all()):
            return exact.round().to(torch.int8), largest / whole
    parts = torch.linspace(LARGEST / 2, LARGEST, 4096, dtype=torch.float64)[:, None]
    errors = ((numbers / largest * parts).round() / parts - numbers / largest).square().sum(1)
    best = parts[errors.argmin()].item()
    return (numbers * (best / largest)).round().to(torch.int8), largest / best


def _bytes_of(fmt: WeightFormat) -> Tensor:
    """uint8 [256]: what a value of 8 bits is stored as."""
    if not fmt.codebook or fmt.bits == 4:
        return torch.arange(256, dtype=torch.uint8) ^ 128
    return functional.pad(stored_table(fmt), (0, 256 - len(fmt.codebook)))


def stored_table(fmt: WeightFormat) -> Tensor:
    """uint8 [C]: the form's table as products look it up."""
    return (integer_table(fmt.codebook)[0].to(torch.int16) + 128).to(torch.uint8)


def _centred(matrix: Matrix) -> Matrix:
    """The same with values of 1 to 3 bits around 8, which stands for 0: minima get small, and are rounded less."""
    values, mins = matrix.values, matrix.mins
    if mins is None or matrix.zeros is not None or matrix.format.bits != 4 or _max_nibble(values[:1]) > 7:
        return matrix
    shift = 8 - (_max_nibble(values) + 1) // 2
    assert matrix.scales is not None
    return matrix._replace(values=values + 17 * shift, mins=mins - shift * matrix.scales) if shift > 4 else matrix


def _max_nibble(values: Tensor) -> int:
    """The largest of 4 bits."""
    return max(int((values & 15).max()), int((values >> 4).max()))


def _offsets(matrix: Matrix) -> tuple[Tensor | None, Tensor | None]:
    """Zero points in bytes, and minima: zero points that are no whole numbers are such, beside 8, which is 0."""
    zeros, mins = matrix.zeros, matrix.mins
    if zeros is None or not zeros.is_floating_point():
        return zeros, mins
    whole = zeros.to(torch.uint8)
    if torch.equal(whole.to(zeros.dtype), zeros):
        return whole, mins
    assert matrix.scales is not None
    shift = (8 - zeros.float()) * matrix.scales.float()
    return None, shift if mins is None else mins + shift


def _scales(
    scales: Tensor, mins: Tensor | None, shape: tuple[int, ...], out: Tensor | None = None
) -> dict[str, Tensor]:
    """float32 [N, G] as products take them, with powers of two."""
    blocks, groups, _ = shape
    scales = scales.contiguous()
    found = {"scales": torch.empty(blocks, groups + POWERS, COLUMNS, dtype=torch.float16) if out is None else out}
    if mins is not None:
        mins, found["mins"] = mins.float().contiguous(), torch.empty(shape, dtype=torch.float16)
    places = (0 if each is None else each.data_ptr() for each in (found["scales"], found.get("mins"), scales, mins))
    sizes = len(scales), scales.shape[1], groups // scales.shape[1]
    if extension().lay_scales(*places, *sizes, True) == NOT_FINITE:
        raise ValueError("its scales or minima are not finite")
    return found


def _finite(scales: Tensor) -> Tensor:
    if not bool(scales.isfinite().all()):
        raise ValueError("its scales are not finite")
    return scales


def _blocks(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[N, G] -> [blocks, G, 64], the groups as often as the shape has them; zeros past the outputs."""
    blocks, groups, _ = shape
    wide = functional.pad(x.repeat_interleave(groups // x.shape[1], 1), (0, 0, 0, blocks * COLUMNS - len(x)))
    return wide.reshape(blocks, COLUMNS, groups).transpose(1, 2).contiguous()


def unpack(packed: Mapping[str, Tensor], outputs: int, inputs: int, fmt: WeightFormat) -> Tensor:
    """pack()'s results -> [outputs, inputs] in float32: what they stand for, and the format."""
    if has_two_level_scales(fmt):
        return _unpack_levels(packed, outputs, inputs, fmt)
    whole, groups = (
        integers(packed["weight"], outputs, inputs),
        shapes(outputs, inputs, packed_format(fmt, inputs))[1][1],
    )

    def wide(x: Tensor) -> Tensor:
        return columns(x, outputs).repeat_interleave(inputs // groups, 1)

    if fmt.codebook and fmt.bits == 4:
        whole = integer_table(fmt.codebook)[0][whole.int() + 8]
    numbers, powers = whole.float(), _powers(packed["scales"], groups)
    if "zeros" in packed:
        numbers = numbers + 8 - wide(packed["zeros"])
    numbers = numbers * wide(packed["scales"][:, :groups])
    if "mins" in packed:
        numbers = numbers + wide(packed["mins"])
    return numbers if powers is None else numbers * powers.reshape(-1, 1)[:outputs]


def _unpack_levels(packed: Mapping[str, Tensor], outputs: int, inputs: int, fmt: WeightFormat) -> Tensor:
    def wide(x: Tensor) -> Tensor:
        rows = x.shape[1] - inputs // LEVEL_INPUTS * 2
        units = columns(x[:, rows:].reshape(len(x), -1, 2 * COLUMNS).contiguous().view(torch.float16), outputs)
        codes = columns(x[:, :rows], outputs)
        return (codes * units.repeat_interleave(rows // units.shape[1], 1)).repeat_interleave(inputs // rows, 1)

    weight = packed["weight"]
    whole = integers(weight[..., : COLUMNS * QUAD // 2], outputs, inputs).float() + 8
    if weight.shape[2] > COLUMNS * QUAD // 2:
        plane = weight[..., COLUMNS * QUAD // 2 :].reshape(*weight.shape[:2], 1, 16, QUAD)
        above = torch.cat([plane >> 2 * height & 3 for height in range(4)], 2)
        whole = (
            whole
            + 16 * above.reshape(*weight.shape[:2], COLUMNS, QUAD).permute(0, 2, 1, 3).reshape(-1, inputs)[:outputs]
        )
    if "mins" in packed:
        return whole * wide(packed["scales"]) + wide(packed["mins"])
    return (whole - (32 if LEVELS[fmt.block_type] == 6 else 8)) * wide(packed["scales"])


def _powers(scales: Tensor, groups: int) -> Tensor | None:
    """float32 [blocks, 64], if they are there."""
    if scales.shape[1] == groups:
        return None
    return scales[:, groups:].contiguous().view(len(scales), -1).view(torch.float32)


def integers(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """pack()'s weight -> int8 [outputs, inputs]."""
    blocks, quads, width = packed.shape
    if width == COLUMNS * QUAD // 2:  # a byte: the same place of two stretches of 16 columns
        halves = packed.reshape(blocks, quads, 2, 1, 16, QUAD)
        packed, offset = torch.cat([halves & 15, halves >> 4], 3), 8
    elif width == COLUMNS * QUAD * 5 // 8:
        packed, offset = _fives(packed), 16
    else:
        offset = 128
    whole = packed.reshape(blocks, quads, COLUMNS, QUAD).permute(0, 2, 1, 3).reshape(-1, quads * QUAD)
    return (whole[:outputs, :inputs].to(torch.int16) - offset).to(torch.int8)


def _fives(packed: Tensor) -> Tensor:
    """[blocks, quads, 160] -> one value in a byte, as of 8 bits: two quads have nibbles, then a plane of bits above."""
    pairs = packed.reshape(len(packed), -1, 2 * packed.shape[2])
    halves = pairs[..., : COLUMNS * QUAD].reshape(*pairs.shape[:2], 2, 2, 1, 16, QUAD)
    low = torch.cat([halves & 15, halves >> 4], 4).reshape(*pairs.shape[:2], 2, 4, 16, QUAD)
    plane = pairs[..., COLUMNS * QUAD :].reshape(*pairs.shape[:2], 1, 16, QUAD)
    above = torch.cat([plane >> height & 1 for height in range(8)], 2).reshape(low.shape)
    return low | above << 4


def columns(scales: Tensor, outputs: int) -> Tensor:
    """pack()'s scales -> float32 [outputs, G]."""
    return scales.permute(0, 2, 1).reshape(-1, scales.shape[1])[:outputs].float()


def scale_type(number: int) -> torch.dtype:
    if INT4_LEVELS <= number <= W6A8_LEVELS:
        return torch.int8
    return torch.float32 if number == W8A8 else torch.float16


def shapes(outputs: int, inputs: int, fmt: WeightFormat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of pack()'s weight and scales."""
    bits = LAID.get(fmt.block_type, fmt.bits)
    blocks, width = -(-outputs // COLUMNS), COLUMNS * QUAD * bits // 8
    if has_two_level_scales(fmt):
        rows = inputs // fmt.group + inputs // LEVEL_INPUTS * 2
        return (blocks, inputs // QUAD, width), (blocks, rows, COLUMNS)
    if kernel_number(fmt) == W8A8:
        if inputs > MAX_INPUTS:
            raise ValueError(f"{inputs} inputs of 8 bits are too many for sums of 32; {MAX_INPUTS} at most")
        groups = 1
    else:
        group = fmt.group or inputs
        if inputs % group or group > MAX_GROUP:
            raise ValueError(f"{inputs} inputs do not divide into groups of {group}, {MAX_GROUP} at most")
        groups = inputs // group
    return (blocks, -(-inputs // QUAD), width), (blocks, groups, COLUMNS)
