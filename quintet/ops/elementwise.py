"""Specifications of what a step computes number by number besides its activations."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, of one shape and type. May overwrite x; callers use what it returns."""
    return x + y


@Op
def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor, rounded once. May overwrite x; callers use what it returns."""
    return x * factor


@Op
def scale_heads(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, H, D], each head times its factor, rounded once; factors [G, 1] float32, each for H / G heads in a row."""
    return (x.float() * factors.repeat_interleave(x.shape[1] // factors.shape[0], 0)).to(x.dtype)


@Op
def scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    """x [T, C], each row times its factor [T, 1] float32, rounded once."""
    return (x.float() * factors).to(x.dtype)


@Op
def scale_by_length(x: Tensor, positions: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
    """x [T, H, D], each head times factor * log(position + 1) + bias; positions [T], factors and bias [H] float32. In
    float32, rounded once. Scalable softmax (Nakanishi 2025)."""
    grown = (positions + 1).float().log()[:, None] * factors + bias
    return (x.float() * grown[:, :, None]).to(x.dtype)


@Op
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32, rounded once (Gemma 2). May overwrite x; callers use what it returns."""
    return ((x.float() / cap).tanh() * cap).to(x.dtype)


@Op
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of one shape and type, in float32, rounded once."""
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


@Op
def squash(x: Tensor, kind: str) -> Tensor:
    """By kind, the sigmoid or the tanh of x: in float32, rounded once."""
    if kind == "sigmoid":
        return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)
    e = torch.exp(-2 * x.float().clamp(min=-40))  # past it, it is -1
    return ((1 - e) / (1 + e)).to(x.dtype)


@Op
def between(x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
    """x + (y - x) * factors[m] for each m, in float32, rounded once; x and y [T, C], factors [M, C] -> [M, T, C]."""
    return (x.float() + (y.float() - x.float()) * factors.float()[:, None]).to(x.dtype)


@Op
def blend(x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """x + (y - x) * sigmoid(logits), of one shape and type, in float32, rounded once."""
    return (x.float() + (y.float() - x.float()) / (1 + torch.exp(-logits.float()))).to(x.dtype)
