"""Dequantization of quantized matrices, and their products with activations that are quantized too."""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix, WeightFormat

SMALLEST = 1e-12  # activations that are all below are taken for zeros: nothing is divided by 0
MIDDLE = 8  # what 4 bits stand for without zero points: 0..15 are -8..7


def dequantized(matrix: Matrix) -> Tensor:
    """[N, K] in float32, inputs in the order in which they come in.

    Symmetric 8 bits are compressed-tensors' W8A16, and GPTQ's; GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023) and
    W4A16 come to the 4 bits; float8 (Micikevicius et al. 2022) has one scale per tensor, channel or block, as
    DeepSeek-V3 (2024) has it: written out for every output.
    """
    fmt, values = matrix.format, unpacked_values(matrix)
    if matrix.zeros is not None:
        values = values - _columns(matrix.zeros.float(), fmt, values.shape[1])
    assert matrix.scales is not None, "what is quantized has scales"
    known = values * _columns(matrix.scales.float(), fmt, values.shape[1])
    if matrix.mins is not None:
        known = known + _columns(matrix.mins.float(), fmt, values.shape[1])
    return known if matrix.input_order is None else known[:, matrix.input_order.argsort()]


def unpacked_values(matrix: Matrix) -> Tensor:
    """The values [N, K] in float32: those of a table looked up, whole ones of 4 bits less what stands for 0 where no
    zero points do."""
    values, fmt = matrix.values, matrix.format
    if fmt.bits == 4:
        values = torch.stack([values & 15, values >> 4], -1).flatten(1)
    if fmt.codebook:
        return torch.tensor(fmt.codebook, device=values.device)[values.int()]
    return values.float() - MIDDLE if fmt.bits == 4 and matrix.zeros is None else values.float()


def int8_product(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K] becomes int8, each token by itself and each of the weight's groups; a group's products are added up in
    int32, groups in float32 -> [T, N] float32.

    With m the largest magnitude there: round(x * (127 / m)), half to even, with the scale m / 127. With one group, the
    dynamic quantization of SmoothQuant (Xiao et al. 2022) and of compressed-tensors' W8A8.
    """
    if weight.zeros is not None or weight.mins is not None or weight.format.codebook:
        return functional.linear(fake_quantized_activations(x, weight), dequantized(weight._replace(input_order=None)))
    values, own = _grouped(x, weight)
    assert weight.scales is not None, "what is quantized has scales"
    whole, values = unpacked_values(weight).reshape(len(weight.values), values.shape[1], -1), values.round()
    try:
        sums = torch.einsum("tgk,ngk->tng", values.to(torch.int32), whole.to(torch.int32)).float()
    except NotImplementedError:  # torch multiplies no int32 on most accelerators; float64 holds the same sums
        sums = torch.einsum("tgk,ngk->tng", values.double(), whole.double()).float()
    return (sums * own[:, None, :, 0] * weight.scales).sum(-1)


def fake_quantized_activations(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K] as its int8 stands for it, in float32, inputs in the weight's order."""
    values, own = _grouped(x, weight)
    return (values.round() * own).reshape(x.shape)


def _grouped(x: Tensor, weight: Matrix) -> tuple[Tensor, Tensor]:
    """x in the weight's groups [T, G, K / G], stretched, and their scales [T, G, 1]."""
    assert weight.scales is not None, "what is quantized has scales"
    x = x if weight.input_order is None else x[:, weight.input_order]
    return _stretched(x.float().reshape(x.shape[0], weight.scales.shape[1], -1), 127.0)


def float8_product(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K] in the weight's type, each token by itself and each of the weight's groups -> [T, N] float32.

    With m the largest magnitude there, and l the type's largest number: x * (l / m), with the scale m / l.
    """
    (tokens, inputs), kind = x.shape, weight.values.dtype
    group = weight.format.group or inputs
    cut = functional.pad(x.float(), (0, -inputs % group)).reshape(tokens, -1, group)
    values, own = _stretched(cut, torch.finfo(kind).max)
    known = (values.to(kind).float() * own).reshape(tokens, -1)[:, :inputs]
    return functional.linear(known, dequantized(weight))


def _stretched(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x [..., C] with each row's largest magnitude brought to `largest`, and the scales [..., 1] that undo it."""
    peak = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    # not largest / peak: torch multiplies by the reciprocal, which is rounded twice
    return x * (torch.full_like(peak, largest) / peak), peak / largest


def _columns(x: Tensor, fmt: WeightFormat, inputs: int) -> Tensor:
    """[N, G] -> [N, inputs], or [N, 1] as it is."""
    return x if x.shape[1] == 1 else x.repeat_interleave(fmt.group, 1)[:, :inputs]
