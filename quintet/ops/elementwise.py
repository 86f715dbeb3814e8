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
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32, rounded once (Gemma 2). May overwrite x; callers use what it returns."""
    return ((x.float() / cap).tanh() * cap).to(x.dtype)


@Op
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), of one shape and type, in float32, rounded once."""
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)
