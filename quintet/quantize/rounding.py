"""A matrix of floats on a scheme's grid: scales by the largest magnitude, values by rounding to nearest."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quintet.quantize.schemes import Scheme

SMALLEST = 2.0**-40  # scales: of what is all zeros, so that nothing is divided by 0; float16 rounds it up
SHRINKS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)  # of a group's reach that is kept, where cutting it pays


class Grid(NamedTuple):
    """Grid of the values of a matrix: scales and zero points; float32."""

    scales: Tensor  # [N, G], of blocks [N / rows, K / columns], of a whole matrix [1]
    zeros: Tensor | None  # [N, G], whole numbers


class QuantizedMatrix(NamedTuple):
    """A matrix that is quantized: (values - zeros) * scales."""

    values: Tensor  # [N, K] int8 of low..high, or float8_e4m3fn
    scales: Tensor  # as the file holds them
    zeros: Tensor | None


def grid(weight: Tensor, scheme: Scheme, dtype: torch.dtype, shrink: float | Tensor = 1.0) -> Grid:
    """Makes the grid of weight [N, K]: it reaches from the smallest to the largest of a group, 0 included; `dtype` is
    the type that scales are stored in. `shrink` (1: all of it) times that, what is beyond being clipped."""
    low, high = _ends(weight.float(), scheme)
    low, high = low * shrink, high * shrink
    if scheme.symmetric:
        span = (scheme.high - scheme.low) / 2
        return Grid(_stored(torch.maximum(-low, high) / span, dtype), None)
    scales = _stored((high - low) / (scheme.high - scheme.low), dtype)
    return Grid(scales, (scheme.low - low / scales).round().clamp(scheme.low, scheme.high))


def round_to_grid(weight: Tensor, known: Grid, scheme: Scheme) -> QuantizedMatrix:
    """weight [N, K] -> the nearest values of the grid."""
    scales, zeros = expand_grid(known, scheme, weight.shape)
    x = weight.float() / scales
    x = (x if zeros is None else x + zeros).clamp(scheme.low, scheme.high)
    values = x.to(torch.float8_e4m3fn) if scheme.floats else x.round().to(torch.int8)
    return QuantizedMatrix(values, known.scales, known.zeros)


def expand_grid(known: Grid, scheme: Scheme, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros as they meet the values of a matrix of this shape."""
    if scheme.per_tensor:
        return known.scales, known.zeros
    if scheme.block:
        rows, columns = scheme.block
        wide = known.scales.repeat_interleave(rows, 0)[: shape[0]]
        return wide.repeat_interleave(columns, 1)[:, : shape[1]], None
    if not scheme.group:
        return known.scales, known.zeros
    zeros = None if known.zeros is None else known.zeros.repeat_interleave(scheme.group, 1)
    return known.scales.repeat_interleave(scheme.group, 1), zeros


def floats(rounded: QuantizedMatrix, scheme: Scheme) -> Tensor:
    """Returns the matrix that it stands for: float32 [N, K]."""
    scales, zeros = expand_grid(Grid(rounded.scales, rounded.zeros), scheme, rounded.values.shape)
    values = rounded.values.float()
    return (values if zeros is None else values - zeros) * scales


def round_to_nearest(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> QuantizedMatrix:
    """Round to nearest: no calibration."""
    return round_to_grid(weight, grid(weight, scheme, dtype), scheme)


def _ends(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each that has a scale; 0 lies between."""
    if scheme.per_tensor:
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    elif scheme.block:
        rows, columns = scheme.block
        wide = functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        blocks = wide.reshape(wide.shape[0] // rows, rows, wide.shape[1] // columns, columns)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        groups = weight.reshape(len(weight), -1, scheme.group or weight.shape[1])
        low, high = groups.amin(-1), groups.amax(-1)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    least = max(SMALLEST, torch.finfo(dtype).tiny)
    return scales.clamp(min=least).to(dtype).float()


def search_grid(weight: Tensor, scheme: Scheme, dtype: torch.dtype, importance: Tensor) -> Grid:
    """The grid of the least squared error, each input's weighted by its `importance` [K]: groups and outputs are cut
    down to as little as SHRINKS says where the rest gains by it."""
    known = grid(weight, scheme, dtype)
    if scheme.block or scheme.per_tensor or scheme.floats:
        return known
    best = _error(weight, known, scheme, importance)
    for shrink in SHRINKS:
        other = grid(weight, scheme, dtype, shrink)
        error = _error(weight, other, scheme, importance)
        better = error < best
        best = torch.where(better, error, best)
        known = Grid(
            torch.where(better, other.scales, known.scales),
            None if known.zeros is None else torch.where(better, other.zeros, known.zeros),  # type: ignore[arg-type]
        )
    return known


def _error(weight: Tensor, known: Grid, scheme: Scheme, importance: Tensor) -> Tensor:
    """[N, G], of each group."""
    off = (floats(round_to_grid(weight, known, scheme), scheme) - weight).square() * importance
    return off.reshape(len(weight), -1, scheme.group or weight.shape[1]).sum(-1)
