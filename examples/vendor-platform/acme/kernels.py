"""Kernels: functions of host tensors that the queue calls. Here they are torch; a real device has its own."""

from collections.abc import Callable
from typing import Any

import torch
from quintet.contract import Op
from quintet.ops.activation import gated
from torch import Tensor
from torch.nn import functional

TILE = 16  # rows that are multiplied at once: every product has one shape, so no row depends on how many there are


def of(op: Op) -> Callable[..., Any]:
    """The kernel of an op that has none of its own below: what the specification says."""
    return op.reference


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] @ packed [K, N] + bias -> [T, N] like x: added up in float32, rounded once."""
    y = tiled(x.float(), packed.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def tiled(x: Tensor, packed: Tensor) -> Tensor:
    """x [T, K] @ packed [K, N] in float32, TILE rows at a time, and whole tiles of columns: of a few columns, libraries
    add up a row by its place among the others."""
    rows, width = len(x), packed.shape[1]
    x, packed = functional.pad(x, (0, 0, 0, -rows % TILE)), functional.pad(packed, (0, -width % TILE))
    y = x.new_empty(len(x), packed.shape[1])
    for first in range(0, len(x), TILE):
        torch.mm(x[first : first + TILE], packed, out=y[first : first + TILE])
    return y[:rows, :width].contiguous()


def product_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[1])


def product_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] by int8 [N, K], whose groups of K / G have scales [N, G]."""
    wide = weight.float() * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    return product(x, wide.t().contiguous(), bias)


def product_int8_shape(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> Tensor:
    """One kernel for a whole feed-forward layer; both weights packed [K, N]."""
    return product(gated.reference(product(x, gate_up, None), kind), down, None)


def gated_mlp_shape(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Every expert computes every token, and a token takes the results of its own; the last row is for no expert."""
    each = [gated_mlp(x, first.t(), second.t(), kind) for first, second in zip(gate_up, down, strict=True)]
    found = torch.stack([*each, torch.zeros_like(x)])
    known = torch.where((ids >= 0) & (ids < len(each)), ids, len(each))
    chosen = found[known.long(), torch.arange(len(x))[:, None]]  # [T, k, D]
    return (chosen.float() * weights[..., None]).sum(1).to(x.dtype)


def experts_shape(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)
