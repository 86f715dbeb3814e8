"""Specification of the matrix products with weights."""

from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op


@Op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias; x [T, K], weight [N, K] as place() returned it, bias [N] -> [T, N]."""
    return functional.linear(x, weight, bias)
