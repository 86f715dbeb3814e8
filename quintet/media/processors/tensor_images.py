"""Functions of torchvision that transformers' video processors call, by torch: torchvision itself may be missing.

Names and arguments are those of torchvision.transforms.v2.functional; frames are tensors [..., C, H, W]. Resizing is
torch.nn.functional.interpolate() on bytes, as there.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SMOOTH = ("bilinear", "bicubic", "lanczos")
# torch before 2.13 has no Lanczos filter; bicubic stands in, as in transformers with a torchvision that has none
_LANCZOS = "lanczos" if hasattr(torch._C._nn, "_upsample_lanczos2d_aa") else "bicubic"
# Pillow's number of a filter -> ours: no member of InterpolationMode, for whose Lanczos transformers asks torchvision's
# version
INTERPOLATIONS = {0: "nearest-exact", 1: _LANCZOS, 2: "bilinear", 3: "bicubic"}


class InterpolationMode(Enum):
    """Filters by torchvision's names."""

    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image: Tensor, size: Sequence[int], interpolation: Any = "bilinear", antialias: bool = True) -> Tensor:
    """Returns frames of [height, width] = `size`."""
    height, width = size
    if image.shape[-2:] == (height, width):
        return image
    interpolation = INTERPOLATIONS.get(interpolation, interpolation)
    mode = str(getattr(interpolation, "value", interpolation))
    options = {"align_corners": False, "antialias": antialias} if mode in _SMOOTH else {}
    frames = image.reshape(-1, *image.shape[-3:])
    found = functional.interpolate(frames, (height, width), mode=mode, **options)
    return found.reshape(*image.shape[:-2], height, width)


def normalize(image: Tensor, mean: Any, std: Any, inplace: bool = False) -> Tensor:
    """Returns (image - mean) / std, by channel."""
    means = torch.as_tensor(mean, dtype=image.dtype, device=image.device).reshape(-1, 1, 1)
    deviations = torch.as_tensor(std, dtype=image.dtype, device=image.device).reshape(-1, 1, 1)
    return (image.sub_(means) if inplace else image - means).div_(deviations)


def grayscale_to_rgb(image: Tensor) -> Tensor:
    """Returns frames of one channel with three."""
    return image if image.shape[-3] >= 3 else image.repeat_interleave(3, -3)


def crop(image: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """Returns a part of each frame, which lies inside."""
    return image[..., top : top + height, left : left + width]


def pad(image: Tensor, padding: Sequence[int], fill: Any = 0, padding_mode: str = "constant") -> Tensor:
    """Returns frames with a border: left, top, right, bottom. `fill`: a number, or one for each channel."""
    left, top, right, bottom = padding
    sides = [left, right, top, bottom]
    if not isinstance(fill, Sequence):
        return functional.pad(image, sides, mode=padding_mode, value=fill or 0)
    channels = zip(image.unbind(-3), fill, strict=True)
    return torch.stack([functional.pad(each, sides, value=value) for each, value in channels], -3)
