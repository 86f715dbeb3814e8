"""torch.xpu on host memory: the names and signatures that torch 2.11 to 2.13 have, on the GPU stand-in.

A graph refuses what SYCL's does: a stream that waits for an event from outside, and parameters that CUDA's has.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.interface.platform import Unavailable
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.runtime import DeviceGraph, Runtime
from quintet.platforms.xpu import facts
from quintet.platforms.xpu.platform import XPU
from quintet.platforms.xpu.runtime import XPURuntime
from tests.platforms.gpu.fake_torch import GIB, FakeRuntime
from tests.platforms.gpu.fake_torch import Event as HostEvent
from tests.platforms.gpu.fake_torch import Stream as HostStream

ARC = "Intel Arc A or Flex [56a0]"


class Stream(HostStream):
    """torch.xpu.Stream; `waits` since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait_stream(self, stream: "Stream") -> None:
        self.waits += 1
        self.work.append(stream.synchronize)

    def synchronize(self) -> None:
        self.run(len(self.work))


class Event(HostEvent):
    """torch.xpu.Event, which knows the default stream as an object."""

    def record(self, stream: Any) -> None:
        super().record(None if stream is self._runtime.default else stream)  # type: ignore[attr-defined]


class XPUGraph:
    """torch.xpu.XPUGraph: capture_begin() takes a pool alone."""

    def __init__(self, module: "FakeModule") -> None:
        self._module = module
        self._run: Callable[[], None] | None = None

    def capture_begin(self, pool: Any = None) -> None:
        stream = self._module.current_stream()
        assert stream is not self._module.host.default, "the default stream is not captured"
        if stream.waits:
            raise RuntimeError("Graph nodes cannot depend on events from outside the graph.")
        self._module.host._here.capturing = True

    def capture_end(self) -> None:
        self._module.host._here.capturing = False
        self._module.host.captures += 1
        self._run = self._module.running

    def replay(self) -> None:
        assert self._run is not None, "called without a successful capture"
        self._module.host.replays += 1
        self._run()


class FakeModule:
    """torch.xpu. `silent`: a driver that does not tell what is free; `stuck`: one that always tells the same."""

    def __init__(self, host: FakeRuntime, silent: bool = False, integrated: bool = False, stuck: bool = False) -> None:
        host.default = Stream()  # type: ignore[attr-defined]
        self.host, self.silent, self.stuck = host, silent, stuck
        self._properties = SimpleNamespace(total_memory=host.limit, is_integrated_gpu=integrated)
        self.running: Callable[[], None] | None = None

    def set_device(self, device: int) -> None:
        self.host.use(device)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        if self.silent:
            raise RuntimeError(
                "The device (Intel(R) Graphics [0x64a0]) doesn't support querying the available free memory. You can "
                "file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize its implementation."
            )
        return (self.host.limit, self.host.limit) if self.stuck else self.host.memory(device)

    def get_device_properties(self, device: int) -> Any:
        return self._properties

    def memory_reserved(self, device: int) -> int:
        return self.host.used()

    memory_allocated = max_memory_allocated = memory_reserved

    def empty_cache(self) -> None:
        self.host.release()

    def Stream(self, device: int) -> Stream:
        return Stream()

    def Event(self) -> Event:
        return Event(self.host)

    def XPUGraph(self) -> XPUGraph:
        return XPUGraph(self)

    def current_stream(self) -> Any:
        return self.host.current() or self.host.default  # type: ignore[attr-defined]

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return self.host.on(stream)

    def graph_pool_handle(self) -> Any:
        return self.host.pool()


class FakeXPURuntime(XPURuntime):
    """What makes tensors is the host's; what drives the device is the platform's own code."""

    def __init__(self, module: FakeModule) -> None:
        super().__init__(module)
        self.module = module

    def empty(self, shape: Sequence[int], dtype: torch.dtype, index: int) -> Tensor:
        return self.module.host.empty(shape, dtype, index)

    def pinned(self, nbytes: int) -> Tensor:
        return self.module.host.pinned(nbytes)

    def copy(self, to: Tensor, source: Tensor) -> None:
        self.module.host.copy(to, source)

    def hold(self, x: Tensor, stream: Any) -> None:
        self.module.host.hold(x, stream)

    def capture(self, run: Callable[[], None], pool: Any, stream: Any) -> DeviceGraph:
        self.module.running = run
        return super().capture(run, pool, stream)


class FakeXPU(XPU):
    """The platform on such devices."""

    op_priority = {}
    _names: tuple[str, ...] = (ARC, ARC)
    _fake: FakeXPURuntime

    @classmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        return GPUFacts(cls._names, facts.DTYPES, None, 0, ", ".join(cls._names))

    @classmethod
    def _make_runtime(cls) -> Runtime:
        return cls._fake

    def _group(self, store: Any, rank: int, size: int) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, size)


def fake_class(limit: int = GIB, names: tuple[str, ...] = (ARC, ARC), **device: bool) -> type[FakeXPU]:
    """A platform of its own on a fresh device."""
    runtime = FakeXPURuntime(FakeModule(FakeRuntime(limit), **device))
    return type("Fake", (FakeXPU,), {"_fake": runtime, "_names": names})


def fake_platform(limit: int = GIB, names: tuple[str, ...] = (ARC, ARC), **settings: Any) -> FakeXPU:
    """On a fresh device."""
    return fake_class(limit, names)(EngineConfig(**settings))


def host(platform: type[FakeXPU] | FakeXPU) -> FakeRuntime:
    """What the platform's devices are made of."""
    return platform._fake.module.host
