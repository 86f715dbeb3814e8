"""A mesh of JAX devices as one quintet device: memory, cache, and copies that run behind the host."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor

from quintet.interface.platform import CacheLost, Device, State
from quintet.interface.types import Layout, Memory
from quintet.platforms.host import host_memory
from quintet.platforms.tpu.multi_host import MultiHostCommunicator
from quintet.platforms.tpu.torchax_bridge import dtype_of, host_array, jax_view, torch_view

AXIS = "model"  # the mesh's only axis: heads, features and vocabulary are cut along it
GIB = 2**30


class TPUDevice(Device):
    """Everything is there once per device of the mesh, or cut along its axis. Of several machines, each process keeps
    what lies on its own devices, gives the same to all of them, and gets whole what steps give."""

    def __init__(self, devices: Sequence[jax.Device], machines: MultiHostCommunicator | None = None) -> None:
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.kind: str = devices[0].platform
        self._machines = machines
        self._pages: tuple[jax.ShapeDtypeStruct, ...] = ()  # of what was allocated last
        self._states: tuple[jax.ShapeDtypeStruct, ...] = ()  # beside these
        self.held: State = ()  # what the last step left, for a caller who was interrupted before taking it

    @property
    def state(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """All that a step takes over."""
        return self._pages + self._states

    @property
    def stateful(self) -> bool:
        """True if a part of the state is per request."""
        return bool(self._states)

    def memory(self) -> Memory:
        here = self.mesh.local_devices
        stats = [device.memory_stats() for device in here]
        if any(each is None for each in stats):  # the processor's devices share the host's memory
            host, count = host_memory(), len(here)
            return Memory(host.free // count, host.total // count, host.peak)
        free = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
        total = min(each["bytes_limit"] for each in stats)
        return Memory(free, total, max(each["peak_bytes_in_use"] for each in stats))

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        self.held = ()  # two caches would not fit
        wanted, states = tuple(self.described(layout, units) for layout in layouts), _are_states(layouts)
        self._pages, self._states = (self._pages, wanted) if states else (wanted, ())
        need, free = sum(shard_bytes(each) for each in wanted), self.memory().free
        if need > free:
            raise MemoryError(
                f"{'states of' if states else 'KV cache of'} {units} {'slots need' if states else 'pages needs'} "
                f"{need / GIB:.2f} GiB, {free / GIB:.2f} GiB are free on each of "
                f"{self.mesh.size} devices; lower kv_cache_memory_bytes or max_model_len"
            )
        make = jax.jit(
            lambda: tuple(jax.numpy.zeros(each.shape, each.dtype) for each in wanted),
            out_shardings=tuple(each.sharding for each in wanted),
        )
        state: State = make()  # arrays of JAX, which the compiled step alone looks into
        return state

    def described(self, layout: Layout, units: int) -> jax.ShapeDtypeStruct:
        """One tensor of the state: cut by KV heads where they divide, else whole on each device."""
        cut = layout.shards == self.mesh.size
        sharding = NamedSharding(self.mesh, PartitionSpec(None, None, AXIS)) if cut else self.replicated
        return jax.ShapeDtypeStruct((units, *layout.shape), dtype_of(layout.dtype), sharding=sharding)

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        placed = jax.device_put(list(arrays), self.replicated) if self._machines is None else self._alike(arrays)
        uploaded: tuple[Tensor, ...] = torch_view(tuple(placed))
        return uploaded

    def _alike(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[jax.Array]:
        """The same on all devices, of which this process fills its own: device_put() would have all processes compare
        what they have at each call, and the engine compares its plans."""
        copies = [jax.device_put(list(arrays), device) for device in self.mesh.local_devices]
        return [
            jax.make_array_from_single_device_arrays(each[0].shape, self.replicated, list(each))
            for each in zip(*copies, strict=True)
        ]

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        array = jax_view(x)
        array.copy_to_host_async()
        if self._machines is not None:
            machines = self._machines
            return lambda: from_host_array(machines.wait_for(lambda: np.array(array)))

        def wait() -> Tensor:
            try:
                return from_host_array(np.array(array))
            except jax.errors.JaxRuntimeError as error:
                self._check_held(error)
                raise

        return wait

    def _check_held(self, error: Exception) -> None:
        """CacheLost if it was a step that failed: what came in was taken over, and what came out is not there."""
        try:
            jax.block_until_ready(self.held)
        except RuntimeError:  # it failed, or was taken over by a step that failed at once
            self.held = ()
            raise CacheLost(f"a step failed on the device and took the cache with it: {error}") from error


def _are_states(layouts: Sequence[Layout]) -> bool:
    """True if the layouts are of states per request, which are allocated behind the pages."""
    return bool(layouts) and layouts[0].unit == "request"


def from_host_array(array: np.ndarray[Any, Any]) -> Tensor:
    """The other way round of bridge.host_array: a tensor on the array's own memory."""
    if array.dtype == dtype_of(torch.bfloat16):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def shard_bytes(of: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes that one device keeps of it."""
    shape = of.sharding.shard_shape(of.shape)
    return int(np.prod(shape)) * of.dtype.itemsize


__all__ = ["AXIS", "TPUDevice", "from_host_array", "host_array"]
