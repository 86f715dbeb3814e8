"""Bounded host (CPU) memory for pages, one row each."""

from collections.abc import Sequence

import numpy as np

from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.offload.eviction import POLICIES, IsPinned


class HostTier:
    """Rows by key. The memory is taken from the system as it fills, and never grows beyond its size."""

    def __init__(self, count: int, words: int, order: str) -> None:
        """count: number of rows."""
        self._rows = np.empty((count, words), np.int32)
        self._order = POLICIES[order](count)
        self._places: dict[bytes, int] = {}
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    @property
    def capacity(self) -> int:
        return self._order.capacity

    def put(self, key: bytes, row: PageRows, spared: IsPinned) -> int:
        """Copies the row, if there is room or another page can be evicted -> number of evicted pages."""
        if key in self._places:
            self._order.touch(key)
            return 0
        kept, gone = self._order.add(key, spared)
        self._free += [self._places.pop(each) for each in gone]
        if kept:
            self._places[key] = self._free.pop()
            self._rows[self._places[key]] = row
        return len(gone)

    def get(self, keys: Sequence[bytes]) -> PageRows:
        """Returns a copy of the rows of these keys, which must be there, and marks them as used."""
        for key in keys:
            self._order.touch(key)
        return self._rows[[self._places[key] for key in keys]]

    def clear(self) -> None:
        for key in list(self._places):
            self._order.remove(key)
            self._free.append(self._places.pop(key))
