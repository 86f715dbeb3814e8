"""Specifications of what a step computes number by number besides its activations."""

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
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32, rounded once (Gemma 2). May overwrite x; callers use what it returns."""
    return ((x.float() / cap).tanh() * cap).to(x.dtype)
