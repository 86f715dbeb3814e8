"""Faults of copies between the host and the device."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acme.device import poisoned
from acme.faults import fault
from acme.launch import enqueue
from acme.tensor import tensors

ALIGNED = 64  # bytes


def _too_soon(to_host: Any) -> Any:
    """The host looks at its memory before the queue has written there: a fast device loses this race, too."""

    def faulty(self: Any, x: Tensor) -> Callable[[], Tensor]:
        to_host(self, x)
        return lambda: poisoned(x)

    return faulty


class _Pinned:
    """One staging buffer for all uploads, which the device reads whenever it likes."""

    def __init__(self, uploaded: Any) -> None:
        self._memory = np.zeros(0, np.uint8)

    def __call__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]
        if sum(sizes) > len(self._memory):
            self._memory = np.zeros(2 * sum(sizes), np.uint8)
        found, at = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            part = self._memory[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            part[...] = array
            found.append(torch.from_numpy(part))
            at += size
        return found


def _short(uploaded: Any) -> Any:
    def faulty(arrays: Any) -> list[Tensor]:
        found: list[Tensor] = uploaded(arrays)
        for each in found:
            if each.numel():
                each.view(-1)[-1:].view(torch.uint8).fill_(255)
        return found

    return faulty


fault("late-copy", "to_host() does not wait for the queue.", "device.wait", ("device:AcmeDevice.to_host", _too_soon))
fault(
    "early-overwrite", "The next upload takes the memory of one under way.", "device.kept", ("device:uploaded", _Pinned)
)
fault("short-read", "An upload leaves out the last element.", "device.arrays", ("device:uploaded", _short))


def _alias(to_host: Any) -> Any:
    """It waits as it should, and hands out the device's own memory."""

    def faulty(self: Any, x: Any) -> Callable[[], Tensor]:
        wait = to_host(self, x)

        def finished() -> Tensor:
            wait()
            return x.buffer.read()

        return finished

    return faulty


def _when_asked(to_host: Any) -> Any:
    return lambda self, x: lambda: to_host(self, x)()


def _same_memory(launch: Any) -> Any:
    """Every run gives its outputs in the memory of the one before: a platform may, and copies must come first."""
    before: dict[int, Any] = {}

    def changed(self: Any, state: Any, batch: Any) -> Any:
        outputs = launch(self, state, batch)
        if id(self) not in before:
            before[id(self)] = outputs
            weakref.finalize(self, before.pop, id(self), None)
            return outputs
        kept = before[id(self)]

        def work(*found: Tensor) -> list[Tensor]:
            return list(found)

        made = tensors(outputs)
        enqueue(self.device, work, tuple(made), [each.buffer for each in tensors(kept)])
        return kept

    return changed


def _as_it_lies(uploaded: Any) -> Any:
    return lambda arrays: uploaded([np.ravel(array, order="K").reshape(array.shape) for array in arrays])


def _no_empty_ones(uploaded: Any) -> Any:
    def faulty(arrays: Any) -> list[Tensor]:
        if any(array.size == 0 for array in arrays):
            raise RuntimeError("acme: error 22 (invalid size)")
        found: list[Tensor] = uploaded(arrays)
        return found

    return faulty


fault(
    "alias-home", "What came home is the device's own memory, and no copy.", "device.kept",
    ("device:AcmeDevice.to_host", _alias),
)  # fmt: skip
fault(
    "lazy-home", "A copy home is started when it is waited for; steps give results in one place.", "device.kept",
    ("device:AcmeDevice.to_host", _when_asked), ("program:Program.launch", _same_memory),
)  # fmt: skip
fault(
    "strides-ignored", "Arrays are uploaded as they lie in memory.", "device.arrays", ("device:uploaded", _as_it_lies)
)
fault(
    "empty-crash", "An array without elements cannot be uploaded.", "device.arrays", ("device:uploaded", _no_empty_ones)
)
