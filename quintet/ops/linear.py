"""Specification of the matrix products with weights, in every format that these are held in."""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix
from quintet.ops.quantized import dequantized, float8_product, int8_product
from quintet.ops.registry import Op

KINDS = ("int8", "int4", "fp8", "w8a8", "w4a8", "fp8a8", "table4", "table8")  # of weights.Form, beside plain

# what a platform may keep of a format beside its kind; grouped: w8a8 in groups, w4a8 without them or with zero points;
# experts: stacks of such matrices; rows: tables in which rows are looked up
EXTRAS = ("mins", "order", "grouped", "experts", "embedding")


@Op.of_kinds(*KINDS)
def linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """x @ weight.T + bias; x [T, K], weight [N, K] as place() returned it, bias [N] -> [T, N].

    `outputs` says which products stand side by side in it (q, k and v), by their widths: N together. Platforms with a
    place() that reorders a weight for its devices return the products in this order.

    Of a format that is not plain: the product of what the numbers stand for, in float32, the bias added, rounded once.
    """
    fmt = weight.format
    if fmt.plain:
        return functional.linear(x, weight.values, bias)
    if fmt.activations == 16:
        y = functional.linear(x.float(), dequantized(weight))
    else:
        y = int8_product(x, weight) if fmt.dtype is None else float8_product(x, weight)
    return (y if bias is None else y + bias.float()).to(x.dtype)


@Op
def by_heads(x: Tensor, weight: Tensor, outputs: int, transposed: bool) -> Tensor:
    """x [T, H, K], each head by its own matrix -> [T, H, outputs]; rounded once, as linear() is.

    weight [H, outputs, K], or with `transposed` [H, K, outputs], as place() returned it: its use is "heads", or
    "transposed heads".
    """
    return torch.einsum("thk,hkn->thn" if transposed else "thk,hnk->thn", x, weight)
