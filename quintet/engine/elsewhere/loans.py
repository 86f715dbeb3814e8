"""Pages that wait in host memory until another engine has fetched them, a bounded number of bytes of them."""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quintet.engine.elsewhere.connector import Rows

NOT_THERE = "it is not there: it was fetched, or nobody came for it in time"


@dataclass
class Loan:
    """The pages of one prompt."""

    places: dict[bytes, int]  # rows, by key
    until: float  # time.monotonic()
    missing: set[bytes] = field(default_factory=set)  # that are still being copied
    broken: str = ""  # why they will not come
    readers: int = 0
    done: set[int] = field(default_factory=set)  # which of those who were to read it have
    gone: bool = False  # its rows are free as soon as nobody reads them


class Loans:
    """Any thread may call anything."""

    def __init__(self, nbytes: int, words: int, lease: float, shared: bool = False) -> None:
        """lease: seconds that a loan waits for its taker. shared: the memory has a descriptor that others may map."""
        count = nbytes // max(4 * words, 1)
        self.descriptor = _shared(4 * words * count) if shared and count else None
        memory = None if self.descriptor is None else mmap.mmap(self.descriptor, 4 * words * count)
        self._rows = np.ndarray((count, words), np.int32, memory)
        self._free = list(range(count - 1, -1, -1))
        self._loans: dict[str, Loan] = {}
        self._lease, self._changed = lease, threading.Condition()
        self.expired = 0  # loans that nobody came for

    def __len__(self) -> int:
        return len(self._loans)

    @property
    def capacity(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> Rows:
        """All of the memory."""
        return self._rows

    @property
    def num_free(self) -> int:
        return len(self._free)

    def promise(self, name: str, keys: Sequence[bytes]) -> bool:
        """Room for pages that are being copied; False: there is none."""
        with self._changed:
            self._expire()
            if len(keys) > len(self._free):
                return False
            places = {key: self._free.pop() for key in keys}
            self._loans[name] = Loan(places, time.monotonic() + self._lease, set(keys))
            return True

    def fill(self, name: str, keys: Sequence[bytes], rows: Rows) -> None:
        with self._changed:
            loan = self._loans.get(name)
            if loan is None:
                return
            self._rows[[loan.places[key] for key in keys]] = rows
            loan.missing.difference_update(keys)
            self._changed.notify_all()

    def spoil(self, name: str, why: str) -> None:
        """What is missing of it will not come."""
        with self._changed:
            if name in self._loans:
                self._loans[name].broken = why
                self._changed.notify_all()

    def read(self, name: str, keys: Sequence[bytes], patience: float) -> tuple[list[Rows | str], Loan | None]:
        """Each row where it lies, or why it is not there; they stay as they are until let_go(). Waits for those that
        are being copied."""
        with self._changed:
            self._expire()
            loan = self._loans.get(name)
            if loan is None:
                return [NOT_THERE] * len(keys), None
            loan.readers += 1
            wanted = set(keys)
            self._changed.wait_for(lambda: loan.broken or loan.gone or not wanted & loan.missing, patience)
            return [self._row(loan, key) for key in keys], loan

    def _row(self, loan: Loan, key: bytes) -> Rows | str:
        if key not in loan.places or loan.gone:
            return NOT_THERE
        return (loan.broken or "it was not copied in time") if key in loan.missing else self._rows[loan.places[key]]

    def row(self, place: Rows) -> int:
        """Where a row that was read lies in the memory."""
        return (place.ctypes.data - self._rows.ctypes.data) // max(self._rows.strides[0], 1)

    def let_go(self, loan: Loan) -> None:
        with self._changed:
            loan.readers -= 1
            self._recycle(loan)

    def end(self, name: str, readers: int = 1, reader: int = 0) -> None:
        """One of those who read it will not ask for it again: it goes when all have said so."""
        with self._changed:
            if name not in self._loans:
                return
            done = self._loans[name].done
            done.add(reader)
            if len(done) >= readers:
                self._drop(name)

    def close(self) -> None:
        """Nobody new may map the memory."""
        with self._changed:
            descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def clear(self) -> None:
        with self._changed:
            for name in list(self._loans):
                self._drop(name)

    def expire(self) -> None:
        """Lets go of what nobody came for."""
        with self._changed:
            self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, loan in self._loans.items() if loan.until < now]:
            self.expired += 1
            self._drop(name)

    def _drop(self, name: str) -> None:
        loan = self._loans.pop(name)
        loan.gone = True
        self._recycle(loan)
        self._changed.notify_all()

    def _recycle(self, loan: Loan) -> None:
        if loan.gone and not loan.readers:
            self._free += loan.places.values()
            loan.places = {}


def _shared(nbytes: int) -> int:
    """A file of memory without a name: nobody opens it who was not given it, and it ends with its processes."""
    descriptor = os.memfd_create("quintet-pages", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor
