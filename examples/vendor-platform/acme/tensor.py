"""A tensor on a device. torch knows its shape and type; its numbers are there for the queue alone."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from acme.memory import Block

if TYPE_CHECKING:
    from acme.device import AcmeDevice

DETACH = torch.ops.aten.detach.default  # nn.Parameter calls it: the same memory under another name


class Slot(int):
    """Where a program keeps a tensor of one run."""


class Buffer:
    """Device memory and what the queue put there. Nobody but kernels may look at `value`, and they run in order."""

    __slots__ = ("block", "device", "error", "slot", "ticket", "value")

    def __init__(self, device: "AcmeDevice", block: Block | None = None, value: Tensor | None = None) -> None:
        self.device, self.block, self.value = device, block, value
        self.error: BaseException | None = None  # of the work that was to fill it
        self.ticket = 0  # of that work
        self.slot: Slot | None = None  # in the program that is being captured

    def read(self) -> Tensor:
        """For kernels: the numbers; or the error that kept them from being computed."""
        if self.value is None and self.error is None:  # another device's: its queue is not this thread's
            self.device.queue.wait(self.ticket)
        if self.error is not None:
            raise self.error
        assert self.value is not None, "a buffer that no work fills"
        return self.value


class AcmeTensor(Tensor):
    """Bound ops compute with it. torch's own functions do not: they would have to wait for the queue."""

    buffer: Buffer
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are wrapped once

    @staticmethod
    def __new__(cls, buffer: Buffer, like: Tensor) -> "AcmeTensor":
        """`like` gives shape, strides and type; it may be on torch's "meta" device."""
        made: AcmeTensor = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("meta")
        )
        made.buffer = buffer
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What torch calls a device that it has no backend for. Inside, torch takes it for "meta", which needs none."""
        return torch.device("privateuseone", self.buffer.device.rank)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without its first argument
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DETACH:
            return AcmeTensor(args[0].buffer, args[0])
        raise RuntimeError(
            f"{func} was called on a tensor of an Acme device outside of a step; there bound ops alone compute "
            "(Capabilities.ops_only), and Device.to_host() brings the numbers to the host"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AcmeTensor({list(self.shape)}, {self.dtype}, acme:{self.buffer.device.rank})"


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree of tuples, named tuples, lists and dicts with each leaf changed."""
    if isinstance(tree, tuple):
        made = [mapped(each, change) for each in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else tuple(made)
    if isinstance(tree, list):
        return [mapped(each, change) for each in tree]
    if isinstance(tree, Mapping):
        return {key: mapped(each, change) for key, each in tree.items()}
    return None if tree is None else change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of such a tree, in order."""
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from leaves(each)
    elif isinstance(tree, Mapping):
        yield from leaves(list(tree.values()))
    elif tree is not None:
        yield tree


def tensors(tree: Any) -> list[AcmeTensor]:
    """The device's tensors in such a tree, in order."""
    return [each for each in leaves(tree) if isinstance(each, AcmeTensor)]


def meta(x: Any) -> Any:
    """Shape, strides and type of a tensor without its numbers; anything else as it is."""
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x
