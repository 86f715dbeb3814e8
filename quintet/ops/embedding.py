"""Specification of the look-up of rows."""

import torch
from torch import Tensor
from torch.nn import functional

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
