"""The connector of a store that answers when it does: another library's, or another machine's.

One thread asks it, one thing at a time: what somebody waits for first, then what is to be kept. A store that hangs
costs a request a moment, and those after it none: what it has is computed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from functools import partial
from typing import Protocol

from quintet.engine.elsewhere.connector import Connector, Load, Lookup, Rows
from quintet.engine.elsewhere.reads import ReadLoad

logger = logging.getLogger(__name__)

QUEUED = 2**28  # bytes that wait to be kept; what comes while there are more is not kept
BEGINNING = 60.0  # seconds within which a store must have begun
ENDING = 10.0  # seconds that close() waits for what is to be kept, and for the store


class Store(Protocol):
    """Pages by key. All of it is called by one thread, and may take long."""

    patience: float  # seconds that a request waits to know what is there

    def has(self, key: bytes) -> bool: ...

    def get(self, key: bytes) -> Rows:
        """ValueError says why it does not come."""

    def put(self, key: bytes, row: Rows) -> bool:
        """Whether it is kept."""

    def close(self) -> None: ...


Job = Callable[[Store], None]


class Late(Connector):
    """One store, begun and asked by a thread that nobody waits for."""

    late = True

    def __init__(self, name: str, begin: Callable[[], Store], words: int) -> None:
        """begin: called by the thread. What it raises is raised here."""
        super().__init__()
        self.name, self.words = name, words
        self._asks, self._writes = deque[Job](), deque[tuple[bytes, Rows]]()
        self._queued, self._queued_bytes = set[bytes](), 0  # of what waits to be kept
        self._wake = threading.Condition()  # of all above
        self._closing: float | None = None  # when to give up
        self._busy: float | None = None  # since when the store has something to do
        self._silent = False  # the log has said that it fails
        self._counts = dict.fromkeys(("kept", "not_kept"), 0)
        begun = Future[Store]()
        self._thread = threading.Thread(target=self._run, args=(begin, begun), name="quintet-pages", daemon=True)
        self._thread.start()
        try:
            self._patience = begun.result(BEGINNING).patience
        except TooLate:
            self._closing = 0.0
            raise ValueError(
                f"{name} has not begun within {BEGINNING:g} s; see whether what it connects to is there"
            ) from None

    def has(self, key: bytes) -> bool:
        return False  # so that nothing old is believed; before a page is kept the store is asked

    def look_up(self, keys: Sequence[bytes]) -> Lookup:
        if self.hangs:
            return StoreLookup(self, keys, 0.0)
        lookup = StoreLookup(self, keys, self._patience)
        self._ask(lookup.run)
        return lookup

    def load(self, keys: Sequence[bytes]) -> Load:
        return ReadLoad(self, keys, self.changed)

    def read(self, key: bytes, then: Callable[[Rows | str], None]) -> None:
        self._ask(partial(self._read, key, then))

    def store(self, keys: Sequence[bytes], rows: Rows) -> None:
        with self._wake:
            for key, row in zip(keys, rows, strict=True):
                if key in self._queued:
                    continue
                if self._queued_bytes + row.nbytes > QUEUED:
                    self._counts["not_kept"] += 1
                    continue
                self._queued.add(key)
                self._queued_bytes += row.nbytes
                self._writes.append((key, row))
            self._wake.notify()

    def clear(self) -> None:
        """What is kept lies there still: it may be another engine's."""
        with self._wake:
            self._writes.clear()
            self._queued.clear()
            self._queued_bytes = 0

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        with self._wake:
            if self._closing is None:
                self._closing = time.monotonic() + ENDING
            self._wake.notify()
        self._thread.join(ENDING / 10 if self.hangs else 1.1 * ENDING)
        if self._thread.is_alive():
            logger.warning("%s does not end; what waited to be kept there is lost", self.name)

    @property
    def hangs(self) -> bool:
        """Whether the store is at one thing for longer than anybody waits."""
        since = self._busy
        return since is not None and time.monotonic() - since > self._patience

    def _ask(self, job: Job) -> None:
        with self._wake:
            self._asks.append(job)
            self._wake.notify()

    # --------------------------------------------------------------------------------------------------- in the thread

    def _run(self, begin: Callable[[], Store], begun: Future[Store]) -> None:
        try:
            store = begin()
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(store)
        while (job := self._next()) is not None:
            self._busy = time.monotonic()
            try:
                job(store)
                self._silent = False
            except Exception as error:
                if not self._silent:  # once, until it goes well again
                    logger.warning("%s fails: %s; what it has is computed", self.name, error)
                self._silent = True
            self._busy = None
        store.close()

    def _next(self) -> Job | None:
        """What is to be done now; None: no more."""
        with self._wake:
            while True:
                if self._closing is not None:
                    self._asks.clear()
                    if not self._writes or time.monotonic() > self._closing:
                        return None
                if self._asks:
                    return self._asks.popleft()
                if self._writes:
                    key, row = self._writes.popleft()
                    return partial(self._write, key, row)
                self._wake.wait()

    def _read(self, key: bytes, then: Callable[[Rows | str], None], store: Store) -> None:
        try:
            row: Rows | str = store.get(key)
        except Exception as error:
            row = f"{self.name}: {error}"
        then(row)

    def _write(self, key: bytes, row: Rows, store: Store) -> None:
        kept = False
        try:
            kept = store.has(key) or store.put(key, row)
        finally:
            with self._wake:
                self._counts["kept" if kept else "not_kept"] += 1
                if key in self._queued:  # else all was cleared
                    self._queued.remove(key)
                    self._queued_bytes -= row.nbytes


class StoreLookup(Lookup):
    """Up to the first page that is not there: what is behind it is of no use without it."""

    def __init__(self, late: Late, keys: Sequence[bytes], patience: float) -> None:
        self._keys, self._changed = keys, late.changed
        self._until = time.monotonic() + patience
        self._count = 0  # of those that are there
        self._done = False

    @property
    def there(self) -> list[bool] | None:
        if not self._done and time.monotonic() < self._until:
            return None
        self._done = True
        count = self._count
        return [at < count for at in range(len(self._keys))]

    def cancel(self) -> None:
        self._done = True

    def run(self, store: Store) -> None:
        """By the store's thread."""
        try:
            for key in self._keys:
                if self._done or not store.has(key):
                    break
                self._count += 1
        finally:
            self._done = True
            self._changed.set()
