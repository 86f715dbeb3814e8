"""The few entry points of torch that a GPU platform uses, as one object: tests put a fake in its place."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

# of a capture that failed; ROCm's build of 2.11 has the fix. Releasing one twice would end the process
KEEPS_POOLS = torch.__version__.startswith("2.11.") and torch.version.hip is None


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class DeviceGraph(Protocol):
    """Captured work; replay() queues it on the current stream."""

    def replay(self) -> None: ...


class Runtime(Protocol):
    """Devices are numbers. Whatever has no device among its parameters is about the thread's current one."""

    def use(self, index: int) -> None:
        """Makes the device the thread's current one: a rank's calls may come from any thread."""

    def memory(self, index: int) -> tuple[int, int]:
        """Bytes (free, total) of the device, which other processes may hold parts of."""

    def idle(self, index: int) -> int:
        """Bytes that the allocator keeps and no tensor uses."""

    def peak(self, index: int) -> int:
        """The most bytes that tensors of this process took."""

    def release(self, workspaces: bool = False) -> None:
        """Gives what the allocator keeps and no tensor uses back to the device; what libraries keep for streams too, if
        nothing captured reads it any more."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor: ...

    def pinned(self, nbytes: int) -> Tensor:
        """uint8 on the host; not given out again before the copies from and to it are done."""

    def stream(self, index: int) -> Any:
        """A new one; it has wait_event()."""

    def current(self) -> Any:
        """The stream that the thread's work goes to."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The thread's work goes to that stream meanwhile."""

    def event(self) -> DeviceEvent: ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Queues the copy on the current stream."""

    def hold(self, x: Tensor, stream: Any) -> None:
        """The memory of x is not given out again before what the stream has to do by now is done."""

    def pool(self) -> Any:
        """A memory pool that graphs may share: they never run at the same time."""

    def capture(self, run: Callable[[], None], pool: Any, stream: Any) -> DeviceGraph:
        """Records what run() queues, and runs none of it. Whatever it raises, nothing is being captured afterwards."""


@dataclass(frozen=True)
class CaptureOptions:
    """Options of graph capture in a vendor's module of torch."""

    graph: str = "CUDAGraph"  # its class
    # of capture_begin(); thread_local: other ranks are threads of this process, and go on meanwhile
    begin: Mapping[str, Any] = field(default_factory=lambda: {"capture_error_mode": "thread_local"})
    joins: bool = True  # whether a stream that waits for another's event may be captured next; else the host waits


class TorchRuntime:
    """torch.cuda, or a module with the same names."""

    def __init__(self, module: Any, kind: str, capturing: CaptureOptions | None = None) -> None:
        self._torch, self._kind, self._capture_options = module, kind, capturing or CaptureOptions()

    def use(self, index: int) -> None:
        self._torch.set_device(index)

    def memory(self, index: int) -> tuple[int, int]:
        free, total = self._torch.mem_get_info(index)
        return int(free), int(total)

    def idle(self, index: int) -> int:
        return int(self._torch.memory_reserved(index) - self._torch.memory_allocated(index))

    def peak(self, index: int) -> int:
        return int(self._torch.max_memory_allocated(index))

    def release(self, workspaces: bool = False) -> None:
        clear = getattr(torch._C, f"_{self._kind}_clearCublasWorkspaces", None)
        if workspaces and clear is not None:
            clear()
        self._torch.empty_cache()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=torch.device(self._kind, index))

    def pinned(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)  # torch keeps freed ones, and their events
        except RuntimeError as error:
            message = str(error).strip().partition("\n")[0]
            if "out of memory" not in message:
                raise
            raise MemoryError(
                f"the driver gives no {nbytes} bytes of pinned memory on the host ({message}); free some of the host's "
                "memory, or raise the limit of what may be locked (ulimit -l; of a container --ulimit memlock=-1)"
            ) from error

    def stream(self, index: int) -> Any:
        return self._torch.Stream(index)

    def current(self) -> Any:
        return self._torch.current_stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch.stream(stream)
        return context

    def event(self) -> DeviceEvent:
        event: DeviceEvent = self._torch.Event()
        return event

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def hold(self, x: Tensor, stream: Any) -> None:
        x.record_stream(stream)

    def pool(self) -> Any:
        return self._torch.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: Any, stream: Any) -> DeviceGraph:
        graph = getattr(self._torch, self._capture_options.graph)()
        before = self._torch.current_stream()
        if self._capture_options.joins:
            stream.wait_stream(before)
        else:
            before.synchronize()
        with self._torch.stream(stream):
            graph.capture_begin(pool=pool, **self._capture_options.begin)
            try:
                run()
                graph.capture_end()
            except BaseException:  # what came first is what went wrong
                self._abandon(graph, pool)
                raise
        before.wait_stream(stream)
        made: DeviceGraph = graph
        return made

    def _abandon(self, graph: Any, pool: Any) -> None:
        """Ends a capture in which something failed. If that has invalidated it, torch 2.11 leaves its allocator in the
        midst of one, so that the next empty_cache() fails (pytorch #180395), and keeps the pool for good (#190348)."""
        try:
            graph.capture_end()
        except RuntimeError:
            device = self._torch.current_device()
            with contextlib.suppress(RuntimeError, AttributeError):  # ended already, where torch does so itself
                getattr(torch._C, f"_{self._kind}_endAllocateToPool")(device, pool)
            if KEEPS_POOLS and self._kind == "cuda":
                getattr(torch._C, "_cuda_releasePool")(device, pool)  # noqa: B009  # builds without CUDA have none
