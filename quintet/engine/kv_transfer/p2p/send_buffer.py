"""Host memory in which pages wait until another engine has fetched them; bounded in bytes."""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quintet.engine.kv_transfer.connector import PageRows

NOT_IN_BUFFER = "the send buffer does not have it: it was fetched, or not fetched within lease_seconds"


@dataclass
class Lease:
    """Pages of one prompt that wait for a consumer."""

    rows: dict[bytes, int]  # rows, by key
    expires: float  # time.monotonic()
    missing: set[bytes] = field(default_factory=set)  # keys that are still being copied
    error: str = ""  # why the missing ones will not arrive
    readers: int = 0
    finished_readers: set[int] = field(default_factory=set)  # readers that have read it
    dropped: bool = False  # its rows are free as soon as they have no reader


class SendBuffer:
    """Loans in host memory. Any thread may call any method."""

    def __init__(self, nbytes: int, words: int, lease: float, shared: bool = False) -> None:
        """lease: seconds that a loan waits for its consumer. shared: the memory has a descriptor that others may
        map."""
        count = nbytes // max(4 * words, 1)
        self.descriptor = _make_memory_file(4 * words * count) if shared and count else None
        memory = None if self.descriptor is None else mmap.mmap(self.descriptor, 4 * words * count)
        self._rows = np.ndarray((count, words), np.int32, memory)
        self._free = list(range(count - 1, -1, -1))
        self._loans: dict[str, Lease] = {}
        self._lease_seconds, self._changed = lease, threading.Condition()
        self.expired = 0  # loans that no consumer has fetched in time

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def capacity(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> PageRows:
        """Returns all of the memory."""
        return self._rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, name: str, keys: Sequence[bytes]) -> bool:
        """Reserves room for pages that are being copied; False: there is none."""
        with self._changed:
            self._expire()
            if len(keys) > len(self._free):
                return False
            places = {key: self._free.pop() for key in keys}
            self._loans[name] = Lease(places, time.monotonic() + self._lease_seconds, set(keys))
            return True

    def fill(self, name: str, keys: Sequence[bytes], rows: PageRows) -> None:
        with self._changed:
            loan = self._loans.get(name)
            if loan is None:
                return
            self._rows[[loan.rows[key] for key in keys]] = rows
            loan.missing.difference_update(keys)
            self._changed.notify_all()

    def fail(self, name: str, why: str) -> None:
        """Marks the missing pages of a loan as failed."""
        with self._changed:
            if name in self._loans:
                self._loans[name].error = why
                self._changed.notify_all()

    def read(self, name: str, keys: Sequence[bytes], patience: float) -> tuple[list[PageRows | str], Lease | None]:
        """Returns each row in place, or why it is not there; rows stay as they are until let_go(). Waits for those that
        are being copied."""
        with self._changed:
            self._expire()
            loan = self._loans.get(name)
            if loan is None:
                return [NOT_IN_BUFFER] * len(keys), None
            loan.readers += 1
            wanted = set(keys)
            self._changed.wait_for(lambda: loan.error or loan.dropped or not wanted & loan.missing, patience)
            return [self._row(loan, key) for key in keys], loan

    def _row(self, loan: Lease, key: bytes) -> PageRows | str:
        if key not in loan.rows or loan.dropped:
            return NOT_IN_BUFFER
        return (loan.error or "it was not copied in time") if key in loan.missing else self._rows[loan.rows[key]]

    def row_index(self, place: PageRows) -> int:
        """Returns the index in the memory of a row that read() has returned."""
        return (place.ctypes.data - self._rows.ctypes.data) // max(self._rows.strides[0], 1)

    def release_read(self, loan: Lease) -> None:
        with self._changed:
            loan.readers -= 1
            self._recycle(loan)

    def finish(self, name: str, of: int = 1, reader: int = 0) -> None:
        """Records that one of `of` readers will not ask for a loan again; drops the loan when all have reported it."""
        with self._changed:
            if name not in self._loans:
                return
            done = self._loans[name].finished_readers
            done.add(reader)
            if len(done) >= of:
                self._drop(name)

    def close(self) -> None:
        """Closes the descriptor: no other process can map the memory from now on."""
        with self._changed:
            descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def clear(self) -> None:
        with self._changed:
            for name in list(self._loans):
                self._drop(name)

    def expire(self) -> None:
        """Drops loans that were not fetched in time."""
        with self._changed:
            self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, loan in self._loans.items() if loan.expires < now]:
            self.expired += 1
            self._drop(name)

    def _drop(self, name: str) -> None:
        loan = self._loans.pop(name)
        loan.dropped = True
        self._recycle(loan)
        self._changed.notify_all()

    def _recycle(self, loan: Lease) -> None:
        if loan.dropped and not loan.readers:
            self._free += loan.rows.values()
            loan.rows = {}


def _make_memory_file(nbytes: int) -> int:
    """Makes a memory file without a name: only processes that get its descriptor can open it, and it ends with them."""
    descriptor = os.memfd_create("quintet-pages", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor
