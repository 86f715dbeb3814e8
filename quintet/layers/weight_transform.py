"""A checkpoint's tensors, of which something else is made while they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
