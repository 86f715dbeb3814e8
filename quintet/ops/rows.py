"""Specifications of rows of a step's tokens: which are kept, what stands in the place of some, and beside them."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [T, D] by number, rows [L] int32 -> [L, D]."""
    return torch.index_select(x, 0, rows)


@Op
def place_rows(x: Tensor, given: Tensor, places: Tensor) -> Tensor:
    """x [T, D] with given[places] [T] where places is not -1; given [M, D] float32 or as x, M > 0, places int32."""
    taken = torch.index_select(given, 0, places.clamp(min=0)).to(x.dtype)
    return torch.where(places[:, None] < 0, x, taken)


@Op
def choose_rows(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    """x [T, D] with the rows of y [T, D] where places [T] int32 is not -1."""
    return torch.where(places[:, None] < 0, x, y)


@Op
def beside(x: Tensor, y: Tensor) -> Tensor:
    """x [T, A] and y [T, B] of one type -> [T, A + B]."""
    return torch.cat([x, y], -1)
