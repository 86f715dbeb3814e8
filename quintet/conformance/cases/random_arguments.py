"""Arguments of ops that a platform is tried with: what a case is, and the numbers in it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Case = tuple[str, tuple[Any, ...]]  # what it is, the op's arguments

Cases = Callable[[torch.dtype], Iterator[Case]]


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)
