"""The blocks of ggml's types with grids (IQ1, IQ2, IQ3): four or eight values at a time are a row of a table.

All values of a type are those of a list of at most eight, or the same with another sign (in IQ1 with another number
added): they are held as indices of 4 bits into both lists, the second from 8 on. The tables come from the package gguf.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

IQ1_DELTA = 0.125  # added to all values of a run, or taken from them
LISTS = {
    "IQ1": tuple(each + IQ1_DELTA for each in (-1, 0, 1)),
    "IQ2": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
SIGNED = 8  # where the second list begins
SIGNS = (0, 7, 14, 21)  # heights of the signs of 8 values each in 32 bits, above them a scale of 4 bits


def codebook(name: str) -> tuple[float, ...]:
    """Returns what the 16 indices stand for: of a list of fewer than eight some are never used."""
    first = LISTS[name]
    second = tuple(each - 2 * IQ1_DELTA for each in first) if name == "IQ1" else tuple(-each for each in first)
    unused = (0.0,) * (SIGNED - len(first))
    return (*map(float, first), *unused, *map(float, second), *unused)


@functools.cache
def _grid(name: str) -> Tensor:
    """Returns the rows of a type's table [R, 8], or [R, 4] of IQ3, as indices into its list: uint8."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    values, rows = torch.tensor(kind.grid_map), torch.from_numpy(kind.grid.reshape(kind.grid_shape))
    return torch.searchsorted(values, rows.to(values.dtype)).to(torch.uint8)


def _indices(name: str, rows: Tensor, high: Tensor) -> Tensor:
    """[N, B, R] of the table's rows, and for the values [N, B, ...], uint8, 1 of the second list -> uint8 [N, B, V]."""
    return _grid(name)[rows.int()].flatten(2) | high.flatten(2) << 3


def _bits(x: Tensor, heights: Sequence[int], count: int) -> Tensor:
    """Whole numbers [..., M] -> [..., M, heights]: `count` bits at each height."""
    return x[..., None] >> torch.tensor(heights, dtype=x.dtype) & (1 << count) - 1


def _words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [N, B, M] as whole numbers of 16 or 32 bits: int32 [N, B, ...], without a sign where they have 16."""
    found = x.clone(memory_format=torch.contiguous_format).view(dtype).int()  # blocks have odd numbers of words
    return found & 0xFFFF if dtype == torch.int16 else found


def _flags(x: Tensor) -> Tensor:
    """uint8 [..., M] -> the bits of each [..., M, 8], the lowest first."""
    return _bits(x, range(8), 1)


def _even(x: Tensor) -> Tensor:
    """Signs of 7 values [..., M] -> of 8 [..., M, 8]: an even number of them are negative."""
    own = x.to(torch.uint8)
    folded = own ^ own >> 4
    folded = folded ^ folded >> 2
    return _flags(own | (folded ^ folded >> 1) << 7)


def _nibbles(x: Tensor) -> Tensor:
    return _bits(x, (0, 4), 4).flatten(2)


def iq2_xxs(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Reads four rows of 32 values, then their signs and scale: the scale of each block [N, B, 1], float32, and the
    bytes behind it [N, B, M] -> indices [N, B, V] and scales [N, B, groups], as all functions here."""
    words = x.unflatten(-1, (8, 8))
    rest = _words(words[..., 4:], torch.int32)[..., 0]
    scales = scale * (0.5 + (rest >> 28 & 15)) * 0.25
    return _indices("IQ2_XXS", words[..., :4].flatten(2), _even(_bits(rest, SIGNS, 7))), scales


def iq2_xs(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of 9 bits below signs of 7, then scales of 4."""
    words = _words(x[..., :64], torch.int16)
    return _indices("IQ2_XS", words & 511, _even(words >> 9)), scale * (0.5 + _nibbles(x[..., 64:])) * 0.25


def iq2_s(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Low bits of rows, signs, the two bits above those, scales."""
    rows = x[..., :32].int() | _bits(x[..., 64:72].int(), (0, 2, 4, 6), 2).flatten(2) << 8
    return _indices("IQ2_S", rows, _flags(x[..., 32:64])), scale * (0.5 + _nibbles(x[..., 72:])) * 0.25


def iq3_xxs(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, then signs and scales as of IQ2_XXS."""
    rest = _words(x[..., 64:], torch.int32)
    scales = scale * (0.5 + (rest >> 28 & 15)) * 0.5
    return _indices("IQ3_XXS", x[..., :64], _even(_bits(rest, SIGNS, 7))), scales


def iq3_s(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Low bits of rows, the bit above them, signs, scales."""
    rows = x[..., :64].int() | _flags(x[..., 64:72]).flatten(2).int() << 8
    return _indices("IQ3_S", rows, _flags(x[..., 72:104])), scale * (1 + 2 * _nibbles(x[..., 104:]))


def iq1_s(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Low bits of rows; then of 32 values the bits above them, a scale of 3, and which list they are of."""
    rest = _words(x[..., 32:], torch.int16)
    rows = x[..., :32].int() | _bits(rest, (0, 3, 6, 9), 3).flatten(2) << 8
    high = (rest >> 15).to(torch.uint8)[..., None].expand(*rest.shape, 32)
    return _indices("IQ1_S", rows, high), scale * (2 * (rest >> 12 & 7) + 1)


def iq1_m(scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Low bits of rows; of 8 values the bits above them, and which list they are of; scales of 3 bits."""
    high = _nibbles(x[..., 32:48])
    rows = x[..., :32].int() | (high & 7).int() << 8
    scales = scale * (2 * _bits(_words(x[..., 48:], torch.int16), (0, 3, 6, 9), 3).flatten(2) + 1)
    return _indices("IQ1_M", rows, (high >> 3)[..., None].expand(*high.shape, 8)), scales


def iq1_m_scale(x: Tensor) -> Tensor:
    """Returns the float16 whose four parts of 4 bits are above the scales of a block of IQ1_M: float32 [N, B, 1]."""
    parts = _words(x[..., 48:], torch.int16) >> 12 << torch.tensor((0, 4, 8, 12), dtype=torch.int32)
    return parts.sum(-1, keepdim=True).to(torch.int16).view(torch.float16).float()
