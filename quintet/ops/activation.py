"""Specifications of the activations, by the names that checkpoints use."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}


@Op
def activate(x: Tensor, kind: str) -> Tensor:
    """kind(x), elementwise."""
    return KINDS[kind](x)


@Op
def gated(x: Tensor, kind: str) -> Tensor:
    """kind(gate) * up, where x [T, 2 I] is gate beside up -> [T, I]; Shazeer 2020."""
    gate, up = x.chunk(2, dim=-1)
    return KINDS[kind](gate) * up
