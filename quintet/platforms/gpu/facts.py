"""What a GPU platform knows of its devices before it opens one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Facts:
    """Devices that may be opened, in the order of their numbers."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # that all of them multiply, best first
    fp8: torch.dtype | None  # the 8-bit type of their products
    memory: int  # bytes of the smallest
    detail: str  # for a person
