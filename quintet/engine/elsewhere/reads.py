"""A load of pages that somebody's threads read one by one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quintet.engine.elsewhere.connector import Arrived, Load, Rows

AHEAD = 8  # pages that a load has read and nobody has taken


class Reader(Protocol):
    """Reads pages in threads of its own."""

    words: int

    def read(self, key: bytes, then: Callable[[Rows | str], None]) -> None:
        """Has `then` called with the page, or with why it does not come."""


class ReadLoad(Load):
    """Pages that are read, a few ahead."""

    def __init__(self, reader: Reader, keys: Sequence[bytes], changed: threading.Event) -> None:
        self._reader, self._keys, self._changed = reader, keys, changed
        self._unread = deque(range(len(keys)))
        self._reading = 0  # asked for, and not taken
        self._read: deque[tuple[int, Rows | str]] = deque()  # threads append to it
        self._ask()

    @property
    def done(self) -> bool:
        return not (self._unread or self._reading)

    def take(self, most: int) -> Arrived:
        places, rows, failed = list[int](), [], dict[int, str]()
        while self._read and len(places) < most:
            place, row = self._read.popleft()
            self._reading -= 1
            if isinstance(row, str):
                failed[place] = row
            else:
                places.append(place)
                rows.append(row)
        self._ask()
        return Arrived(places, np.stack(rows) if rows else np.zeros((0, self._reader.words), np.int32), failed)

    def cancel(self) -> None:
        """What is being read is read on, for nobody."""
        self._unread.clear()
        self._reading = 0

    def _ask(self) -> None:
        """For the next pages."""
        while self._unread and self._reading < AHEAD:
            place = self._unread.popleft()
            self._reading += 1
            self._reader.read(self._keys[place], lambda row, place=place: self._came(place, row))  # type: ignore[misc]

    def _came(self, place: int, row: Rows | str) -> None:
        self._read.append((place, row))
        self._changed.set()
