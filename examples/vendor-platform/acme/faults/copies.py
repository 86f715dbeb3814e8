"""Faults of copies between the host and the device."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acme.device import poisoned
from acme.faults import fault

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
