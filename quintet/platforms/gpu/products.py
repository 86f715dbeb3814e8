"""Has the head's product written to where a graph leaves its logits, so that they are not copied there."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class LogitsRedirect(TorchDispatchMode):
    """Sees a step's plain products twice: eagerly, where it notes what each gave, and while the step is captured,
    where the one that gave the logits writes to their buffer.

    What it takes for the head only spares a copy: the caller of the capture copies what does not lie in its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gave: list[int] = []  # addresses, of each product's result
        self._count = 0
        self._place: int | None = None  # which product is the head's; None: none is written to `_to`
        self._to: Tensor | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the step that runs eagerly."""
        self._gave, self._place, self._to = [], None, None
        with self:
            yield

    @contextlib.contextmanager
    def redirecting(self, logits: Tensor | None, to: Tensor | None) -> Iterator[None]:
        """Context of the step that is captured. `logits` is what the eager step gave, and must not have been freed."""
        self._count, self._place, self._to = 0, None, to
        if logits is not None and to is not None and logits.shape == to.shape and logits.is_contiguous():
            # the last: memory of another product before it may have been given out again
            self._place = max((at for at, each in enumerate(self._gave) if each == logits.data_ptr()), default=None)
        with self if self._place is not None else contextlib.nullcontext():
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        factors = _factors(func, args, kwargs)
        if factors is None:
            return func(*args, **(kwargs or {}))
        place, self._count = self._count, self._count + 1
        if place == self._place and self._to is not None and _fits(factors, self._to):
            return torch.mm(*factors, out=self._to)
        given = func(*args, **(kwargs or {}))
        if self._place is None:
            self._gave.append(given.data_ptr())
        return given


def _factors(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """Returns the factors of a product of two matrices without a bias; None for any other call."""
    if kwargs:
        return None
    if func is aten.mm.default or (func is aten.matmul.default and args[0].dim() == args[1].dim() == 2):
        return args[0], args[1]
    if func is aten.linear.default and args[0].dim() == 2 and (len(args) < 3 or args[2] is None):
        return args[0], args[1].t()
    return None


def _fits(factors: tuple[Tensor, Tensor], to: Tensor) -> bool:
    x, y = factors
    return (x.shape[0], y.shape[1]) == to.shape and x.dtype == to.dtype
