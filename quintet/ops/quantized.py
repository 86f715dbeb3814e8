"""Specifications of the matrix products with quantized weights, and with quantized activations.

All take x [T, K] and weights as [N, K], and give [T, N] like x: products of what the numbers stand for, in float32,
the bias [N] added, rounded once. Scales are float32 and multiply. `outputs` as in linear(): a platform whose place()
packs a scheme takes the weight and its scales as that left them.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op

Outputs = tuple[int, ...]
SMALLEST = 1e-12  # activations that are all below are taken for zeros: nothing is divided by 0
MIDDLE = 8  # what 4 bits stand for without zero points: 0..15 are -8..7


@Op
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    """weight int8 [N, K], scales [N, G]: K / G inputs in a row share one; G = 1 is one per channel.

    Symmetric; the weights of compressed-tensors' W8A16, and of GPTQ with 8 bits.
    """
    return _linear(x, weight.float() * _columns(scales, weight.shape[1]), bias)


@Op
def linear_int4(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, outputs: Outputs
) -> Tensor:
    """weight uint8 [N, K / 2]: byte i holds the inputs 2 i (low bits) and 2 i + 1 (high bits), each 0..15.

    scales [N, G], and zeros [N, G] uint8 or floating, None for 8: (value - zero) * scale, K / G inputs in a row sharing
    them. GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023) and W4A16 come to this; GPTQ's act-order with its
    inputs, and so x, permuted.
    """
    inputs = weight.shape[1] * 2
    values = torch.stack([weight & 15, weight >> 4], -1).reshape(-1, inputs).float()
    values = values - (MIDDLE if zeros is None else _columns(zeros.float(), inputs))
    return _linear(x, values * _columns(scales, inputs), bias)


@Op
def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, block: int, outputs: Outputs) -> Tensor:
    """weight float8_e4m3fn or float8_e5m2 [N, K] (Micikevicius et al. 2022).

    With block 0, scales are [1, 1] for the tensor or [N, 1] for its channels; else [ceil(N / block), ceil(K / block)],
    the last ones for what is left (DeepSeek-V3 2024: 128).
    """
    return _linear(x, weight.float() * _blocks(scales, weight.shape, block), bias)


@Op
def linear_w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    """weight int8 [N, K], scales [N, 1]; each token of x becomes int8 too, and products are added up in int32.

    With m a token's largest magnitude: round(x * (127 / m)), half to even, with the scale m / 127. The dynamic
    quantization of SmoothQuant (Xiao et al. 2022) and of compressed-tensors' W8A8.
    """
    values, own = _stretched(x.float(), 127.0)
    sums = values.round().to(torch.int32) @ weight.to(torch.int32).t()
    return _finish(sums.float() * own * scales.t(), x, bias)


@Op
def linear_w4a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    """weight and scales [N, G] as in linear_int4, without zero points; x becomes int8 as in linear_w8a8, but with a
    scale for each of a token's G groups of inputs. A group's products are added up in int32, groups in float32.
    """
    (tokens, inputs), groups = x.shape, scales.shape[1]
    values, own = _stretched(x.float().reshape(tokens, groups, -1), 127.0)
    whole = torch.stack([weight & 15, weight >> 4], -1).reshape(-1, groups, inputs // groups).to(torch.int32) - MIDDLE
    sums = torch.einsum("tgk,ngk->tng", values.round().to(torch.int32), whole).float()
    return _finish((sums * own[:, None, :, 0] * scales).sum(-1), x, bias)


@Op
def linear_fp8_dynamic(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, block: int, outputs: Outputs
) -> Tensor:
    """linear_fp8 with x in the weight's type too, each token, or each `block` inputs of it, with a scale of its own.

    With m the largest magnitude there, and l the type's largest number: x * (l / m), with the scale m / l.
    """
    tokens, inputs = x.shape
    cut = functional.pad(x.float(), (0, -inputs % block)).reshape(tokens, -1, block) if block else x.float()
    values, own = _stretched(cut, torch.finfo(weight.dtype).max)
    known = (values.to(weight.dtype).float() * own).reshape(tokens, -1)[:, :inputs]
    y = functional.linear(known, weight.float() * _blocks(scales, weight.shape, block))
    return _finish(y, x, bias)


def _stretched(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """x [..., C] with each row's largest magnitude brought to `largest`, and the scales [..., 1] that undo it."""
    peak = x.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    return x * (largest / peak), peak / largest


def _columns(x: Tensor, inputs: int) -> Tensor:
    """[N, G] -> [N, inputs], or [N, 1] as it is."""
    return x if x.shape[1] == 1 else x.repeat_interleave(inputs // x.shape[1], 1)


def _blocks(scales: Tensor, shape: torch.Size, block: int) -> Tensor:
    """Scales that broadcast to the weight's shape."""
    if not block:
        return scales
    return scales.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _finish(functional.linear(x.float(), weight), x, bias)


def _finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return (y if bias is None else y + bias.float()).to(x.dtype)
