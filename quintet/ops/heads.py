"""Specification of products with one weight per head, as latent attention (MLA) has for q and for its outputs."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def by_heads(x: Tensor, weight: Tensor, outputs: int, transposed: bool) -> Tensor:
    """x [T, H, K], each head by its own matrix -> [T, H, outputs]; rounded once, as linear() is.

    weight [H, outputs, K], or with `transposed` [H, K, outputs], as place() returned it: its use is "heads", or
    "transposed heads".
    """
    return torch.einsum("thk,hkn->thn" if transposed else "thk,hnk->thn", x, weight)
