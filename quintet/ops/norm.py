"""Specifications of the normalisations."""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op


@Op
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / rms(x) * (offset + weight) over the last axis, in float32; x [..., D], weight [D] -> [..., D] like x.

    Zhang and Sennrich 2019. With offset 0 the rounding to x's type comes before the weight, with 1 (Gemma) after it.
    """
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (y * (offset + weight.float())).to(x.dtype)
    return y.to(x.dtype) * weight


@Op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm.reference(total, weight, eps, offset), total


@Op
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis; Ba, Kiros and Hinton 2016."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


@Op
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, width: int, after: bool) -> Tensor:
    """x [T, C] normalised in pieces of `width` by their root mean square, times weight ([C], or [width] for each piece
    alike) and silu(gate) -> [T, C] in gate's type. All in float32, rounded once.

    The gate comes before the norm (Mamba 2, Dao and Gu 2024), or `after` it; without a weight there is no norm.
    """
    y, factor = x.float(), gate.float() / (1 + torch.exp(-gate.float()))
    y = y if after else y * factor
    if weight is not None:
        pieces = y.reshape(y.shape[0], -1, width)
        pieces = pieces * torch.rsqrt(pieces.pow(2).mean(-1, keepdim=True) + eps)
        y = (pieces * weight.float().reshape(-1, width)).reshape(y.shape)
    return (y * factor if after else y).to(gate.dtype)
