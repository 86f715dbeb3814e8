"""Specifications of the activations, by the names that checkpoints use."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

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


class ClampedGate(NamedTuple):
    """The gate (up + shift) * gate * sigmoid(alpha * gate) of gated(), where gate is at most the limit, and up within
    it (gpt-oss; OpenAI 2025). Its kind is the str of it, which gated() and experts take, and activate() does not."""

    alpha: float
    limit: float
    shift: float

    def __str__(self) -> str:
        return f"clamped {self.alpha!r} {self.limit!r} {self.shift!r}"

    @classmethod
    def of(cls, kind: str) -> "ClampedGate | None":
        """Returns what a kind names; None where it is an activation's."""
        name, *numbers = kind.split(" ")
        if name != "clamped" or len(numbers) != 3:
            return None
        found = cls(*map(float, numbers))
        if not found.limit > 0:
            raise ValueError(f"gates have the limit {found.limit}; it must be above 0")
        return found


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
    """Returns gated()'s kind whose gate is at most the limit and whose up is within it; `kind` itself for None.
    ValueError for a limit that is not above 0."""
    if limit is not None and not limit > 0:
        raise ValueError(f"gates have the limit {limit}; it must be above 0")
    return kind if limit is None else f"{kind}{LIMIT}{limit}"


def split_limit(kind: str) -> tuple[str, float | None]:
    """with_limit() undone: the activation's name, and the limit or None."""
    name, _, limit = kind.partition(LIMIT)
    return name, float(limit) if limit else None


@Op
def gated(x: Tensor, kind: str) -> Tensor:
    """kind(gate) * up, where x [T, 2 I] is gate beside up -> [T, I]; Shazeer 2020.

    With a kind "silu<=10.0", gate is 10 at most, and up -10 to 10 (gpt-oss 2025, without its other changes). A
    ClampedGate's kind is computed in float32, and rounded once.
    """
    name, limit = split_limit(kind)
    gate, up = x.chunk(2, dim=-1)
    if (clamp := ClampedGate.of(kind)) is not None:
        gate, up = gate.float().clamp(max=clamp.limit), up.float().clamp(-clamp.limit, clamp.limit)
        return ((up + clamp.shift) * (gate / (1 + (gate * -clamp.alpha).exp()))).to(x.dtype)
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
