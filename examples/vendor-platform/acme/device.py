"""One opened device: its queue, its memory, and copies that run behind the host."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from quintet.contract import Device, Layout, Memory, State
from torch import Tensor

from acme.chip import CHIP
from acme.launch import Shapes, enqueue
from acme.memory import Pool
from acme.queue import Queue
from acme.tensor import AcmeTensor, Buffer


class AcmeDevice(Device):
    """What tensors, kernels and programs of one rank share."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.queue, self.pool = Queue(f"acme:{rank}"), Pool(CHIP.memory, f"acme:{rank}")
        self.shapes = Shapes()
        self.layouts: tuple[Layout, ...] = ()  # of the cache that was allocated last: steps are captured for it

    def memory(self) -> Memory:
        self.queue.drain()  # what was let go may still be in use there
        return self.pool.facts()

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        self.queue.drain()
        self.layouts = tuple(layouts)
        need = units * sum(layout.nbytes for layout in layouts)
        self.pool.take(need, "kv", f"KV cache of {units} pages")  # all or nothing: given back at once
        return tuple(self._zeros((units, *layout.shape), layout.dtype) for layout in layouts)

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        made = [self.empty(_described(array)) for array in arrays]
        enqueue(self, uploaded, (list(arrays),), [each.buffer for each in made])
        return tuple(made)

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        assert isinstance(x, AcmeTensor), f"{type(x).__name__} is not on this device"
        pinned = poisoned(x)
        copied = Buffer(self)
        enqueue(self, pinned.copy_, (x,), [copied])

        def wait() -> Tensor:
            self.queue.wait(copied.ticket)
            return copied.read()

        return wait

    def upload(self, x: Tensor, tag: str) -> AcmeTensor:
        """A host tensor on the device, at once: the host's memory may be gone when this returns."""
        kept = x.clone(memory_format=torch.contiguous_format)
        return AcmeTensor(Buffer(self, self.pool.take(kept.nbytes, tag), kept), kept)

    def overwrite(self, there: Tensor, x: Tensor, rows: tuple[int, int] | None = None) -> None:
        """Puts other numbers where `there` is, or in so many rows of it (first, count), once what is queued has read
        those before."""
        assert isinstance(there, AcmeTensor) and there.shape[1:] == x.shape[1:] and there.dtype == x.dtype
        first, count = rows or (0, there.shape[0])
        assert len(x) == count and first + count <= there.shape[0]
        self.queue.drain()
        there.buffer.read()[first : first + count].copy_(x)

    def empty(self, like: Tensor, tag: str = "activations") -> AcmeTensor:
        """Memory that work is to fill."""
        return AcmeTensor(Buffer(self, self.pool.take(like.nbytes, tag)), like)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> AcmeTensor:
        made = self.empty(torch.empty(shape, dtype=dtype, device="meta"), "kv")
        enqueue(self, zeroed, (shape, dtype), [made.buffer])
        return made


def _described(array: np.ndarray[Any, Any]) -> Tensor:
    """Its shape and type as torch has them."""
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return torch.empty(array.shape, dtype=dtype, device="meta")


def uploaded(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
    return [torch.from_numpy(np.array(array, order="C")) for array in arrays]


def zeroed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """NumPy's zeros take host memory when they are first written to."""
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(*shape)


def poisoned(like: Tensor) -> Tensor:
    """Host memory in which a copy that has not come yet shows: NaN, or -1."""
    with torch.inference_mode(False):  # the engine's mode is this thread's alone, and the queue writes here
        pinned = torch.empty(like.shape, dtype=like.dtype)
    pinned.view(-1).view(torch.uint8).fill_(255)
    return pinned
