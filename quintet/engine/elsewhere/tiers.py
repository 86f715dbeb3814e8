"""The connector of one engine's own tiers: host memory, and a folder behind it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from quintet.engine.elsewhere.connector import Arrived, Connector, Load, Rows
from quintet.engine.elsewhere.disk import Disk
from quintet.engine.elsewhere.host import HostMemory

AHEAD = 8  # pages that a load has read from the disk and nobody has taken


class Tiers(Connector):
    """What is stored goes to host memory at once and to the disk behind it; what is read comes from the first that has
    it. What came from the disk lies in host memory again."""

    def __init__(self, host: HostMemory, disk: Disk | None = None) -> None:
        super().__init__()
        self.host, self.disk = host, disk
        self.awaited: Counter[bytes] = Counter()  # keys in host memory that loads will take; they stay there
        self._evicted = self._from_disk = 0

    def has(self, key: bytes) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk)

    def load(self, keys: Sequence[bytes]) -> Load:
        return TierLoad(self, keys)

    def store(self, keys: Sequence[bytes], rows: Rows) -> None:
        for key, row in zip(keys, rows, strict=True):
            self.remember(key, row)
            if self.disk is not None:
                self.disk.write(key, row)

    def remember(self, key: bytes, row: Rows) -> None:
        """In host memory, if there is room beside what is awaited."""
        self._evicted += self.host.put(key, row, lambda other: other in self.awaited)

    def came_from_disk(self, key: bytes, row: Rows) -> None:
        self._from_disk += 1
        self.remember(key, row)

    def clear(self) -> None:
        """The disk's keep lying there: they may be another start's."""
        self.host.clear()

    def counts(self) -> Mapping[str, int]:
        there = {"host_pages": len(self.host), "host_evicted": self._evicted}
        return there if self.disk is None else {**there, "disk_pages": len(self.disk), "disk_loaded": self._from_disk}

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()


class TierLoad(Load):
    """Pages of host memory are there at once; those of the disk are read a few ahead."""

    def __init__(self, tiers: Tiers, keys: Sequence[bytes]) -> None:
        self._tiers, self._keys = tiers, keys
        self._here = deque(place for place, key in enumerate(keys) if key in tiers.host)
        self._unread = deque(place for place, key in enumerate(keys) if key not in tiers.host)
        self._reading = 0  # asked for, and not taken
        self._read: deque[tuple[int, Rows | str]] = deque()  # threads append to it
        tiers.awaited.update(keys[place] for place in self._here)
        assert tiers.disk is not None or not self._unread, "a page was asked for that is nowhere"
        self._ask()

    @property
    def done(self) -> bool:
        return not (self._here or self._unread or self._reading)

    def take(self, most: int) -> Arrived:
        here = [self._here.popleft() for _ in range(min(most, len(self._here)))]
        rows = self._tiers.host.get([self._keys[place] for place in here])
        self._spare([self._keys[place] for place in here])
        read, failed = self._taken(most - len(here))
        self._ask()
        if not read:
            return Arrived(here, rows, failed)
        for place, row in read:
            self._tiers.came_from_disk(self._keys[place], row)
        return Arrived(here + [place for place, _ in read], np.concatenate([rows, [row for _, row in read]]), failed)

    def cancel(self) -> None:
        """What is being read is read on, for nobody."""
        self._spare([self._keys[place] for place in self._here])
        self._here.clear()
        self._unread.clear()
        self._reading = 0

    def _taken(self, most: int) -> tuple[list[tuple[int, Rows]], dict[int, str]]:
        """What has come from the disk."""
        read: list[tuple[int, Rows]] = []
        failed: dict[int, str] = {}
        while self._read and len(read) < most:
            place, row = self._read.popleft()
            self._reading -= 1
            if isinstance(row, str):
                failed[place] = row
            else:
                read.append((place, row))
        return read, failed

    def _ask(self) -> None:
        """For the next pages on the disk."""
        disk = self._tiers.disk
        while disk is not None and self._unread and self._reading < AHEAD:
            place = self._unread.popleft()
            self._reading += 1
            disk.read(self._keys[place], lambda row, place=place: self._came(place, row))  # type: ignore[misc]

    def _came(self, place: int, row: Rows | str) -> None:
        self._read.append((place, row))
        self._tiers.changed.set()

    def _spare(self, keys: Sequence[bytes]) -> None:
        """They may go again."""
        self._tiers.awaited.subtract(keys)
        for key in keys:
            if self._tiers.awaited[key] <= 0:
                del self._tiers.awaited[key]
