"""A checkpoint's tensors, of which something else is made while they are read: heads of length 1 among them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD = "lm_head.weight"
MIN_LENGTH = {0: 1e-7, 1: 1e-12}  # what lengths are kept away from 0 by: added to a column's, the least of a row's


@dataclass(frozen=True)
class TransformedTensor:
    """Entry for a tensor that `change` makes of another, and of others beside it."""

    entry: Any  # shape, dtype and tensor()
    change: Callable[..., Tensor]
    extra_entries: tuple[Any, ...] = ()  # more entries, which it is called with, too
    new_shape: tuple[int, ...] | None = None  # its shape; None: as the entry's

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        shape: tuple[int, ...] = self.entry.shape if self.new_shape is None else self.new_shape
        return shape

    @property
    def dtype(self) -> Any:
        """Dtype of the entry and of the result."""
        return self.entry.dtype

    def tensor(self) -> Tensor:
        """Returns the result."""
        return self.change(self.entry.tensor(), *(each.tensor() for each in self.extra_entries))


def normalise_head(entries: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> Mapping[str, Any]:
    """A checkpoint's tensors, the head among them as normalise_rows() or normalise_columns() makes it."""
    return {name: TransformedTensor(entry, change) if name == HEAD else entry for name, entry in entries.items()}


def normalise_rows(head: Tensor) -> Tensor:
    """[vocab, hidden], each token's length 1 (Baichuan 2)."""
    return torch.nn.functional.normalize(head.float(), eps=MIN_LENGTH[1]).to(head.dtype)


def normalise_columns(head: Tensor) -> Tensor:
    """[vocab, hidden], each feature's length over all tokens 1 (Ling)."""
    wide = head.float()
    return (wide / (wide.norm(dim=0, keepdim=True) + MIN_LENGTH[0])).to(head.dtype)
