"""One opened GPU: packed uploads, copies to the host behind the next step, and the cache."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.interface.platform import Device, DeviceLost, State
from quintet.interface.types import Layout, Memory
from quintet.platforms.gpu.memory import TaggedMemory, send
from quintet.platforms.gpu.runtime import Runtime

GIB = 2**30
ALIGN = 64  # bytes between arrays of one upload: kernels are specialised for pointers that are multiples of 16
# bytes left to what no plan counts: libraries' workspaces, communicators, what captures take beyond the plan
RESERVE = 512 * 2**20
TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32, np.dtype(np.uint8): torch.uint8}


# Codes of CUDA and HIP after which a context works on: a wrong argument, no memory, a launch that asks for too much,
# and (900 to 909) a capture that went wrong.
PASSING = frozenset({1, 2, 9, 701, *range(900, 910)})
# How Triton's launches say the same (its drivers' gpuAssert, 3.6): plain RuntimeErrors without a code.
TRITON, PASSED = "Triton Error [", ("out of memory", "invalid argument", "out of resources", "capture")


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Turns an error that leaves the context broken into DeviceLost."""
    try:
        yield
    except RuntimeError as error:
        if (lost := device_lost_error(error)) is not None:
            raise lost from error
        raise


def device_lost_error(error: RuntimeError) -> DeviceLost | None:
    """Returns DeviceLost for a torch or Triton error that breaks the device's context, such as an illegal access: every
    later call fails, and only a new process helps. An error with an unknown code counts as one."""
    message = str(error).strip().partition("\n")[0] or "no reason given"
    theirs = message.startswith(TRITON) and not any(word in message for word in PASSED)
    ours = isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) not in PASSING
    if not (ours or theirs):
        return None
    return DeviceLost(f"the device serves this process no more, start another: {message}")


class GPUDevice(Device):
    """The device of one rank. Work goes to the thread's current stream; results come home on one of their own."""

    def __init__(self, runtime: Runtime, index: int) -> None:
        runtime.use(index)
        self.runtime, self.index = runtime, index
        self.tagged_memory = TaggedMemory(runtime, index)
        self.pooled = 0  # bytes that captured steps have for themselves: idle, and not for other tensors
        self._to_host_stream = runtime.stream(index)

    def memory(self) -> Memory:
        self.runtime.use(self.index)
        free, total = self.runtime.memory(self.index)
        free += self.idle()
        return Memory(max(0, min(free, total) - RESERVE), total, self.runtime.peak(self.index))

    def idle(self) -> int:
        """Bytes that the allocator keeps, no tensor uses, and a tensor may have."""
        return max(0, self.runtime.idle(self.index) - self.pooled)

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        need, free = sum(layout.nbytes for layout in layouts) * units, self.memory().free
        if need > free:
            raise MemoryError(self._no_room(units, need, free))
        self.runtime.release()  # what was freed in other sizes may be just what is missing
        try:
            state = tuple(self._zeros((units, *layout.shape), layout.dtype) for layout in layouts)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{self._no_room(units, need, free)} ({error})") from None
        self.tagged_memory.track("cache", state)
        return state

    @device_errors()
    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        """All in one copy: what a step's dozen small arrays cost is the number of copies. An array that comes again is
        the same tensor, and the beginning of one that came lies where that does: neither is written to."""
        self.runtime.use(self.index)
        starts: list[int] = []
        end, again = 0, _duplicates(arrays)
        for index, array in enumerate(arrays):
            starts.append(starts[again[index]] if index in again else end)
            end += 0 if index in again else -(-array.nbytes // ALIGN) * ALIGN
        if end == 0:
            return tuple([self.runtime.empty(array.shape, _dtype(array), self.index) for array in arrays])
        staged = self.runtime.pinned(end)
        written = staged.numpy()
        for index, (start, array) in enumerate(zip(starts, arrays, strict=True)):
            if index in again:
                continue
            flat = np.ascontiguousarray(array).reshape(-1)
            written[start : start + array.nbytes].view(array.dtype)[:] = flat
        there = self.runtime.empty((end,), torch.uint8, self.index)
        self.runtime.copy(there, staged)
        views: dict[torch.dtype, Tensor] = {}
        tensors: list[Tensor] = []
        for index, array in enumerate(arrays):
            same = index in again and array.shape == arrays[again[index]].shape
            tensors.append(tensors[again[index]] if same else _part(there, views, starts[index], array))
        return tuple(tensors)

    @device_errors()
    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        """The copy waits for what has been queued by now, and for nothing that comes later."""
        self.runtime.use(self.index)
        if x.numel() == 0:
            return lambda: torch.empty(x.shape, dtype=x.dtype)
        x = x.contiguous()
        computed, arrived = self.runtime.event(), self.runtime.event()
        computed.record(self.runtime.current())
        self._to_host_stream.wait_event(computed)
        here = self.runtime.pinned(x.numel() * x.element_size()).view(x.dtype).view(x.shape)
        with self.runtime.on(self._to_host_stream):
            self.runtime.copy(here, x)
            arrived.record(self._to_host_stream)
        self.runtime.hold(x, self._to_host_stream)

        def wait() -> Tensor:
            with device_errors():
                arrived.synchronize()
            return here

        return wait

    def sleep(self, level: int) -> int:
        return self.tagged_memory.sleep(level)

    def wake(self) -> None:
        self.tagged_memory.wake()

    def upload(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the host's in that type, through two pieces of pinned memory; done when it returns."""
        self.runtime.use(self.index)
        try:
            there = self.runtime.empty(x.shape, dtype, self.index)
        except torch.OutOfMemoryError as error:
            raise MemoryError(self._weight_error(x.numel() * dtype.itemsize, error)) from None
        send(self.runtime, there, x)
        return there

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        whole = self.runtime.empty((math.prod(shape) * dtype.itemsize,), torch.uint8, self.index)
        return whole.zero_().view(dtype).view(*shape)

    def _weight_error(self, need: int, error: Exception) -> str:
        free = self.runtime.memory(self.index)[0]
        return (
            f"a weight needs {need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free on device {self.index} ({error}); end "
            "what else is on it, or choose a smaller model"
        )

    def _no_room(self, pages: int, need: int, free: int) -> str:
        return (
            f"KV cache of {pages} pages needs {need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free on device "
            f"{self.index}; lower gpu_memory_utilization, kv_cache_memory_bytes or max_model_len"
        )


def _dtype(array: np.ndarray[Any, Any]) -> torch.dtype:
    return TYPES.get(array.dtype) or torch.from_numpy(array[:0]).dtype


def _duplicates(arrays: Sequence[np.ndarray[Any, Any]]) -> dict[int, int]:
    """Maps the index of each array that is an earlier one, or its beginning, to the index of that one."""
    found: dict[int, int] = {}
    firsts: dict[int, int] = {}  # by what has the memory
    for index, array in enumerate(arrays):
        first = firsts.setdefault(id(array if array.base is None else array.base), index)
        if first != index and array.nbytes and _is_prefix(arrays[first], array):
            found[index] = first
    return found


def _is_prefix(whole: np.ndarray[Any, Any], part: np.ndarray[Any, Any]) -> bool:
    if part is whole:
        return True
    alike = part.ndim == whole.ndim == 1 and part.dtype == whole.dtype and len(part) <= len(whole)
    return alike and part.strides == whole.strides and part.ctypes.data == whole.ctypes.data


def _part(there: Tensor, views: dict[torch.dtype, Tensor], start: int, array: np.ndarray[Any, Any]) -> Tensor:
    """The array's stretch of an upload; a tensor made of another by one call, not by four."""
    dtype = _dtype(array)
    if dtype not in views:
        views[dtype] = there.view(dtype)
    strides = [1] * array.ndim
    for axis in range(array.ndim - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, array.shape[axis + 1])
    return views[dtype].as_strided(array.shape, strides, start // dtype.itemsize)
