"""Specifications of the look-up of rows."""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix
from quintet.ops.quantized import dequantized
from quintet.ops.registry import Op


@Op
def embedding(ids: Tensor, weight: Tensor, first: int, partial: bool) -> Tensor:
    """Rows of weight [V, D] for ids [T] -> [T, D]. A partial table holds the rows from `first` on; others give 0."""
    if not partial:
        return functional.embedding(ids, weight)
    local = ids - first
    inside = (local >= 0) & (local < weight.shape[0])
    rows = functional.embedding(torch.where(inside, local, 0), weight)
    return torch.where(inside[:, None], rows, 0.0)


@Op
def quantized_embedding(ids: Tensor, weight: Matrix, first: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Rows of a table [V, D] = shape that is not plain, as place() returned it, for ids [T] -> [T, D] in `dtype`.

    A row is what its numbers stand for in float32, rounded once. The table holds the rows from `first` on; other ids
    give 0. Called where Capabilities.weight_formats has "embedding"; otherwise tables are floats.
    """
    local = ids.long() - first
    inside = (local >= 0) & (local < shape[0])
    rows = dequantized(_rows(weight, torch.where(inside, local, 0))).to(dtype)
    return torch.where(inside[:, None], rows, 0.0)


def _rows(matrix: Matrix, chosen: Tensor) -> Matrix:
    """Returns the chosen rows of a canonical matrix, in this order."""
    values, (scales, zeros, mins) = matrix.values, (matrix.scales, matrix.zeros, matrix.mins)
    taken = values.view(torch.uint8)[chosen].view(values.dtype)  # torch takes no rows of 8-bit floats
    scales, zeros, mins = (None if each is None else each[chosen] for each in (scales, zeros, mins))
    return Matrix(taken, scales, zeros, matrix.input_order, matrix.format, mins)


@Op
def place_tokens(token_ids: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
    """token_ids [T], with sampled[rows] where rows [T] is not -1; sampled [S], S > 0. All int32, and T may be any size.

    A sampled -1 (no token could be drawn) counts as 0: its request ends, and until then no row -1 may be read.
    """
    taken = torch.index_select(sampled, 0, rows.clamp(min=0))
    return torch.where(rows < 0, token_ids, taken.clamp(min=0))
