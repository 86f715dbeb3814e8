"""Specification of the matrix products with weights."""

from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op


@Op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """x @ weight.T + bias; x [T, K], weight [N, K] as place() returned it, bias [N] -> [T, N].

    `outputs` says which products stand side by side in it (q, k and v), by their widths: N together. Platforms whose
    place() brings a weight into another order for its devices bring the products into this one.
    """
    return functional.linear(x, weight, bias)
