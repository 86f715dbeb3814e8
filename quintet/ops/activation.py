"""Specifications of the activations, by the names that checkpoints use."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    """So et al. 2021 (Primer)."""
    y = functional.relu(x)
    return y * y


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
    "silu": functional.silu,
}


class UnknownActivation(ValueError):
    """Raised for an activation that has no implementation; the caller adds the name of the model."""

    def __init__(self, kind: str, known: Iterable[str]) -> None:
        super().__init__(f"activation {kind!r} is not known; there are {', '.join(sorted(known))}")


@Op
def activate(x: Tensor, kind: str) -> Tensor:
    """kind(x), elementwise."""
    return KINDS[kind](x)


LIMIT = "<="  # between an activation's name and the limit of its gates


def with_limit(kind: str, limit: float | None) -> str:
    """Returns gated()'s kind whose gate is at most the limit and whose up is within it; `kind` itself for None."""
    return kind if limit is None else f"{kind}{LIMIT}{limit}"


def split_limit(kind: str) -> tuple[str, float | None]:
    """with_limit() undone: the activation's name, and the limit or None."""
    name, _, limit = kind.partition(LIMIT)
    return name, float(limit) if limit else None


@Op
def gated(x: Tensor, kind: str) -> Tensor:
    """kind(gate) * up, where x [T, 2 I] is gate beside up -> [T, I]; Shazeer 2020.

    With a kind "silu<=10.0", gate is 10 at most, and up -10 to 10 (gpt-oss 2025, without its other changes).
    """
    name, limit = split_limit(kind)
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return KINDS[name](gate) * up


@Op
def xielu(x: Tensor, learned: Tensor) -> Tensor:
    """p x^2 + x / 2 where x > 0, else n (exp(min(x, -1e-6)) - 1 - x) + x / 2: in float32, rounded once.

    `learned` float32 [2] is p and n - 1 / 2 before softplus (Huang and Schlag 2024).
    """
    p, n = functional.softplus(learned).unbind(0)
    y = x.float()
    below = (y.clamp(max=-1e-6).exp() - 1 - y) * (n + 0.5)
    return (torch.where(y > 0, p * y * y, below) + y * 0.5).to(x.dtype)
