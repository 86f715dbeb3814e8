"""Load of pages that a reader's threads read one by one."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quintet.engine.kv_transfer.connector import Load, LoadedPages, PageRows

READ_AHEAD = 8  # pages that a load requests before the engine has taken them


class PageReader(Protocol):
    """Reads pages in threads of its own."""

    words: int

    def read(self, key: bytes, then: Callable[[PageRows | str], None]) -> None:
        """Calls `then` with the page, or with why it cannot be read."""


class ThreadedLoad(Load):
    """Load that reads a few pages ahead."""

    def __init__(self, reader: PageReader, keys: Sequence[bytes], changed: threading.Event) -> None:
        self._reader, self._keys, self._changed = reader, keys, changed
        self._unread = deque(range(len(keys)))
        self._reading = 0  # pages requested, and not taken
        self._read: deque[tuple[int, PageRows | str]] = deque()  # threads append to it
        self._ask()

    @property
    def done(self) -> bool:
        return not (self._unread or self._reading)

    def take(self, most: int) -> LoadedPages:
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
        return LoadedPages(places, np.stack(rows) if rows else np.zeros((0, self._reader.words), np.int32), failed)

    def cancel(self) -> None:
        """Drops the load; pages that are being read are discarded."""
        self._unread.clear()
        self._reading = 0

    def _ask(self) -> None:
        """Requests the next pages from the reader."""
        while self._unread and self._reading < READ_AHEAD:
            place = self._unread.popleft()
            self._reading += 1
            self._reader.read(self._keys[place], lambda row, place=place: self._came(place, row))  # type: ignore[misc]

    def _came(self, place: int, row: PageRows | str) -> None:
        self._read.append((place, row))
        self._changed.set()
