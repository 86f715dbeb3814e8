"""KV connector of one engine's own tiers: host (CPU) memory, and a folder on disk behind it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np

from quintet.engine.kv_transfer.connector import KVConnector, Load, LoadedPages, PageRows
from quintet.engine.kv_transfer.offload.disk import DiskTier
from quintet.engine.kv_transfer.offload.host_memory import HostTier
from quintet.engine.kv_transfer.offload.threaded_load import ThreadedLoad
from quintet.engine.kv_transfer.rank_agreement import RankAgreement


class TieredConnector(KVConnector):
    """Connector that stores pages in host memory at once and on the disk behind it, and loads a page from the first
    that has it. A page that was read from disk is put into host memory again."""

    def __init__(self, host: HostTier, disk: DiskTier | None = None, council: RankAgreement | None = None) -> None:
        """council: of rank processes. All have the same pages in host memory; each reports there which pages its disk
        has."""
        super().__init__()
        self.host, self.disk, self._rank_agreement = host, disk, council
        self.per_rank = disk is not None and council is not None
        self.pinned: Counter[bytes] = Counter()  # keys in host memory that loads will take; they are not evicted
        self._evicted = self._from_disk = 0

    def has(self, key: bytes) -> bool:
        return key in self.host or (not self.per_rank and self.has_locally(key))

    def has_locally(self, key: bytes) -> bool:
        return self.disk is not None and key in self.disk

    def load(self, keys: Sequence[bytes]) -> Load:
        return TierLoad(self, keys)

    def read_disk(self, keys: Sequence[bytes]) -> Load:
        """Loads pages from the disk alone."""
        assert self.disk is not None, "a page was asked for that is nowhere"
        load = ThreadedLoad(self.disk, keys, self.changed)
        return load if self._rank_agreement is None else self._rank_agreement.agreed_load(load, len(keys))

    def store(self, keys: Sequence[bytes], rows: PageRows) -> None:
        for key, row in zip(keys, rows, strict=True):
            self.add_to_host(key, row)
            if self.disk is not None:
                self.disk.write(key, row)

    def add_to_host(self, key: bytes, row: PageRows) -> None:
        """Puts a page into host memory, if there is room beside the awaited pages."""
        self._evicted += self.host.put(key, row, lambda other: other in self.pinned)

    def add_from_disk(self, key: bytes, row: PageRows) -> None:
        self._from_disk += 1
        self.add_to_host(key, row)

    def clear(self) -> None:
        """Clears host memory; pages on disk stay, since they may be another start's."""
        self.host.clear()

    def counts(self) -> Mapping[str, int]:
        there = {"host_pages": len(self.host), "host_evicted": self._evicted}
        return there if self.disk is None else {**there, "disk_pages": len(self.disk), "disk_loaded": self._from_disk}

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()


class TierLoad(Load):
    """Load of pages: those in host memory arrive at once; those on disk arrive when they have been read."""

    def __init__(self, tiers: TieredConnector, keys: Sequence[bytes]) -> None:
        self._tiers, self._keys = tiers, keys
        self._here = deque(place for place, key in enumerate(keys) if key in tiers.host)
        self._behind = [place for place, key in enumerate(keys) if key not in tiers.host]
        tiers.pinned.update(keys[place] for place in self._here)
        self._disk_load = tiers.read_disk([keys[place] for place in self._behind]) if self._behind else None

    @property
    def done(self) -> bool:
        return not self._here and (self._disk_load is None or self._disk_load.done)

    def take(self, most: int) -> LoadedPages:
        here = [self._here.popleft() for _ in range(min(most, len(self._here)))]
        rows = self._tiers.host.get([self._keys[place] for place in here])
        self._unpin([self._keys[place] for place in here])
        if self._disk_load is None or self._disk_load.done:
            return LoadedPages(here, rows)
        came = self._disk_load.take(most - len(here))
        failed = {self._behind[at]: why for at, why in came.failed.items()}
        if not came.indices:
            return LoadedPages(here, rows, failed)
        read = [self._behind[at] for at in came.indices]
        for place, row in zip(read, came.rows, strict=True):
            self._tiers.add_from_disk(self._keys[place], row)
        return LoadedPages(here + read, np.concatenate([rows, came.rows]), failed)

    def cancel(self) -> None:
        self._unpin([self._keys[place] for place in self._here])
        self._here.clear()
        if self._disk_load is not None:
            self._disk_load.cancel()

    def _unpin(self, keys: Sequence[bytes]) -> None:
        """Lets these pages be evicted again."""
        self._tiers.pinned.subtract(keys)
        for key in keys:
            if self._tiers.pinned[key] <= 0:
                del self._tiers.pinned[key]
