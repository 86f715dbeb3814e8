"""Weights to canonical matrices: those of floats by quantizing, those of a quantized checkpoint as it has them.

A platform that packs floats itself need not come here.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix, Weight, WeightFormat
from quintet.ops.quantized import MIDDLE


def canonical(weight: Weight, parts: Mapping[str, Tensor]) -> Matrix:
    """This rank's matrix, in the weight's format."""
    return concat_outputs(canonicals(weight, parts))


def canonicals(weight: Weight, parts: Mapping[str, Tensor]) -> list[Matrix]:
    """The same, each part by itself."""
    if weight.reader is not None:
        return weight.local_matrices(parts)
    return [quantize(piece, weight.format) for piece in weight.local_slices(parts)]


def concat_outputs(matrices: Sequence[Matrix]) -> Matrix:
    """One after the other by their outputs; all have one format."""
    if len(matrices) == 1:
        return matrices[0]
    first = matrices[0]
    assert all(each.format == first.format and each.input_order is None for each in matrices), (
        "one product has one form"
    )
    values, scales, zeros, mins = (
        None if getattr(first, name) is None else torch.cat([getattr(each, name) for each in matrices])
        for name in ("values", "scales", "zeros", "mins")
    )
    assert values is not None
    return Matrix(values, scales, zeros, format=first.format, mins=mins)


def attributes(matrix: Matrix) -> dict[str, Tensor]:
    """Returns a matrix's tensors as place() does, by the names that a layer has for them."""
    named = {"weight": matrix.values, "scales": matrix.scales, "zeros": matrix.zeros, "order": matrix.input_order}
    return {name: each for name, each in {**named, "mins": matrix.mins}.items() if each is not None}


def stack_attributes(name: str, placed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same of a stack that a layer calls `name`: "gate_up", "gate_up_scales", and so on."""
    return {name if each == "weight" else f"{name}_{each}": tensor for each, tensor in placed.items()}


def quantize(weight: Tensor, fmt: WeightFormat) -> Matrix:
    """[N, K] -> canonical; symmetric: the largest of a group, by its magnitude, is met exactly. K is a multiple of the
    form's group.

    Four bits reach from -8 to 7: the largest becomes -8, so that all 16 values serve; a scale may be negative.
    """
    if fmt.zeros or fmt.mins or fmt.act_order:
        raise ValueError(f"{fmt.kind} with zeros, minima or order is read from checkpoints, not made")
    if fmt.codebook:
        return _nearest_codes(weight, fmt)
    if fmt.dtype is not None:
        return _floats(weight, fmt, fmt.dtype)
    outputs, inputs = weight.shape
    groups = weight.float().reshape(outputs, -1, fmt.group or inputs)
    if fmt.bits == 8:
        scales = groups.abs().amax(-1, keepdim=True) / 127
        values = _divided(groups, scales).clamp(-127, 127).to(torch.int8).reshape(outputs, inputs)
        return Matrix(values, scales[..., 0], format=fmt)
    largest = torch.take_along_dim(groups, groups.abs().argmax(-1, keepdim=True), -1)
    scales = largest / -MIDDLE
    values = (_divided(groups, scales).clamp(-MIDDLE, MIDDLE - 1) + MIDDLE).to(torch.uint8).reshape(outputs, inputs)
    return Matrix(values[:, ::2] | values[:, 1::2] << 4, scales[..., 0], format=fmt)


def _floats(weight: Tensor, fmt: WeightFormat, dtype: torch.dtype) -> Matrix:
    """The largest of a block, by its magnitude, becomes the type's largest."""
    (outputs, inputs), largest = weight.shape, torch.finfo(dtype).max
    rows, columns = fmt.outputs_per_scale or outputs, fmt.group or inputs
    wide = functional.pad(weight.float(), (0, -inputs % columns, 0, -outputs % rows))
    blocks = wide.reshape(len(wide) // rows, rows, -1, columns)
    scales = _finite(blocks.abs().amax((1, 3), keepdim=True)) / largest
    values = (blocks / torch.where(scales == 0, 1.0, scales)).clamp(-largest, largest).to(dtype)
    known = scales[..., 0].expand(-1, rows, -1).reshape(len(wide), -1)[:outputs]
    return Matrix(values.reshape(wide.shape)[:outputs, :inputs].contiguous(), known.contiguous(), format=fmt)


def _nearest_codes(weight: Tensor, fmt: WeightFormat) -> Matrix:
    """Each number becomes the nearest of the table's, once the largest of its group is brought to the table's; halfway,
    the lower one. With the tables of bitsandbytes, what its quantize_4bit() gives, bit for bit."""
    outputs, inputs = weight.shape
    table, order = torch.tensor(fmt.codebook, device=weight.device).sort(stable=True)
    groups, most = weight.float().reshape(outputs, -1, fmt.group or inputs), float(table.abs().max())
    peaks = _finite(groups.abs().amax(-1, keepdim=True))
    scaled = (groups * (1.0 / peaks.clamp(min=1e-38))).clamp(-1, 1) * most
    values = order.to(torch.uint8)[torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True)]
    values = values.reshape(outputs, inputs)
    packed = values[:, ::2] | values[:, 1::2] << 4 if fmt.bits == 4 else values
    return Matrix(packed, peaks[..., 0] / most, format=fmt)


def _finite(peaks: Tensor) -> Tensor:
    if not bool(peaks.isfinite().all()):
        raise ValueError("the weight holds numbers that are not finite")
    return peaks


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    """Whole multiples of the scales; a group of zeros has none."""
    return torch.where(scales == 0, 0.0, groups / torch.where(scales == 0, 1.0, scales)).round()
