"""Weights in floating point to the formats of quantized.py; a platform that packs them itself need not come here."""

import torch
from torch import Tensor

from quintet.ops.quantized import MIDDLE
from quintet.types import Scheme


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[N, K] -> (what linear_<scheme> multiplies with, its scales [N, G]); symmetric: the largest of a group, by its
    magnitude, is met exactly. K is a multiple of the scheme's group.

    Four bits reach from -8 to 7: the largest becomes -8, so that all 16 values serve; a scale may be negative.
    """
    outputs, inputs = weight.shape
    groups = weight.float().reshape(outputs, -1, scheme.group or inputs)
    if scheme.bits == 8:
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return _divided(groups, scales).clamp(-127, 127).to(torch.int8).reshape(outputs, inputs), scales[..., 0]
    largest = torch.take_along_dim(groups, groups.abs().argmax(-1, keepdim=True), -1)
    scales = largest / -MIDDLE
    values = (_divided(groups, scales).clamp(-MIDDLE, MIDDLE - 1) + MIDDLE).to(torch.uint8).reshape(outputs, inputs)
    return values[:, ::2] | values[:, 1::2] << 4, scales[..., 0]


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    """Whole multiples of the scales; a group of zeros has none."""
    return torch.where(scales == 0, 0.0, groups / torch.where(scales == 0, 1.0, scales)).round()
