"""Experts without gates, by two products of quintet._cpu for rows that lie sorted by expert.

Weights are packed as those of other experts are. What was not packed has three dimensions, and goes to torch.
"""

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops.activation import activate
from quintet.ops.linear import linear as product
from quintet.ops.moe import grouped_linear, run_by_expert, ungated_experts
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops import moe as native_moe


def probe() -> str | None:
    """Checks the packed products, and then one token's square, doubled."""
    if reason := native_moe.probe():
        return reason
    x, up = torch.tensor([[3.0, -1.0]]), torch.eye(2)[None]
    weights, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    got = _native(x, native_moe.pack_experts(up), native_moe.pack_experts(up * 2), weights, ids, "relu2")
    return None if got.tolist() == [[18.0, 0.0]] else f"an expert of {x.tolist()} gave {got.tolist()}, not [[18, 0]]"


@ungated_experts.provide("native", probe)
def _native(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    if up.dim() == down.dim() == 3:
        return _torch(x, up, down, weights, ids, kind)
    multiply, act, hidden = grouped_linear.providers["native"], activate.providers["torch"], x.shape[1]
    inner = down.shape[2] * linear.PAIRS.get(down.dtype, 1)

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = multiply(act(multiply(rows, up, counts)[:, :inner], kind), down, counts)
        return out[:, :hidden]

    return run_by_expert(x, weights, ids, len(down), serve)


@ungated_experts.provide("torch")
def _torch(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Expert by expert, each on the tokens that it serves."""
    multiply, act = product.providers["torch"], activate.providers["torch"]
    each = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        served = (ids == expert).nonzero(as_tuple=True)  # tokens, and the places that the expert has among theirs
        if len(served[0]):
            inner = act(multiply(x[served[0]], Matrix(first), None, (len(first),)), kind)
            each[served] = multiply(inner, Matrix(second), None, (len(second),))
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)
