"""Specifications of the activations, by the names that checkpoints use."""

from collections.abc import Callable, Iterable

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


class UnknownActivation(ValueError):
    """An activation that nothing here computes; whoever knows the model says which one asks for it."""

    def __init__(self, kind: str, known: Iterable[str]) -> None:
        super().__init__(f"activation {kind!r} is not known; there are {', '.join(sorted(known))}")


@Op
def activate(x: Tensor, kind: str) -> Tensor:
    """kind(x), elementwise."""
    return KINDS[kind](x)


@Op
def gated(x: Tensor, kind: str) -> Tensor:
    """kind(gate) * up, where x [T, 2 I] is gate beside up -> [T, I]; Shazeer 2020."""
    gate, up = x.chunk(2, dim=-1)
    return KINDS[kind](gate) * up
