"""GPTQ (Frantar et al. 2022): each input's rounding error is made up for by the inputs that are rounded after it."""

import torch
from torch import Tensor

from quintet.quantize.rounding import Grid, QuantizedMatrix, round_to_grid, search_grid
from quintet.quantize.schemes import Scheme

BLOCK = 128  # inputs in a block: their errors are carried to all that follow at once


def gptq(
    weight: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype, dampening: float = 0.01, ordered: bool = False
) -> QuantizedMatrix:
    """weight [N, K], hessian [K, K]: the mean of x x' -> the values that keep the products.

    `ordered`: inputs of the largest second moment first. The grid of a group is that of the weights as they were, so
    that values keep their places and groups are of neighbours; else it is made when the group's turn comes.
    """
    inverse, order = _inverse(hessian, dampening, ordered)
    rest = weight.float()[:, order].clone()
    rest[:, hessian.diagonal()[order] == 0] = 0.0
    importance = hessian.diagonal()
    known = search_grid(weight, scheme, dtype, importance)
    size = scheme.group or BLOCK
    size = size * max(1, BLOCK // size)
    for first in range(0, rest.shape[1], size):
        last = min(first + size, rest.shape[1])
        block, errors = rest[:, first:last], torch.zeros(len(rest), last - first)
        for place in range(last - first):
            column = first + place
            if scheme.group and not ordered and column % scheme.group == 0:
                group = slice(column, column + scheme.group)
                new = search_grid(block[:, place : place + scheme.group], scheme, dtype, importance[group])
                _update_group(known, column // scheme.group, new)
            got = _one(block[:, place], known, int(order[column]), scheme)
            errors[:, place] = (block[:, place] - got) / inverse[column, column]
            block[:, place:] -= errors[:, place, None] * inverse[column, column:last]
            block[:, place] = got
        rest[:, last:] -= errors @ inverse[first:last, last:]
    return round_to_grid(rest[:, order.argsort()], known, scheme)


def _inverse(hessian: Tensor, dampening: float, ordered: bool) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of the damped Hessian's inverse, and the order of the inputs that it is in."""
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True) if ordered else torch.arange(len(hessian))
    damped = hessian[order][:, order] + torch.diag((diagonal == 0).double()[order])
    share, mean = dampening, diagonal.mean().clamp(min=1e-12)
    while True:
        factor, failed = torch.linalg.cholesky_ex(damped + torch.eye(len(hessian)) * share * mean)
        if not failed or share > 1:
            break
        share *= 10  # too little for what the samples leave undetermined
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    return upper.float(), order


def _update_group(known: Grid, group: int, new: Grid) -> None:
    """The grid of one group, of the weights as the errors before left them."""
    known.scales[:, group] = new.scales[:, 0]
    if known.zeros is not None and new.zeros is not None:
        known.zeros[:, group] = new.zeros[:, 0]


def _one(x: Tensor, known: Grid, column: int, scheme: Scheme) -> Tensor:
    """One input's weights [N] on the grid."""
    group = column // scheme.group if scheme.group else 0
    scales = known.scales[:, group]
    zeros = 0.0 if known.zeros is None else known.zeros[:, group]
    return ((x / scales + zeros).round().clamp(scheme.low, scheme.high) - zeros) * scales
