"""Specification of the rotary position embedding."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q [T, H, D] and k [T, Hkv, D] by their positions [T]; Su et al. 2021, the halves paired.

    table [max_position, rot] float32 holds rot/2 cosines and then rot/2 sines per position; features past rot stay.
    """
    cos, sin = torch.index_select(table, 0, positions)[:, None, :].to(q.dtype).chunk(2, dim=-1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
