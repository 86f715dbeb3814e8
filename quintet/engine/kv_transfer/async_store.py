"""KV connector for stores with slow look-ups: another library's (LMCache), or another machine's.

One thread calls the store, one operation at a time: first those that a request waits for, then pages to be stored. A
store that hangs delays one request for a moment, and later requests not at all: their pages are computed.
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

from quintet.engine.kv_transfer.connector import KVConnector, Load, Lookup, PageRows
from quintet.engine.kv_transfer.offload.threaded_load import ThreadedLoad

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2**28  # bytes of pages that wait to be stored; pages that do not fit are not stored
START_SECONDS = 60.0  # seconds that a store may take to start
CLOSE_SECONDS = 10.0  # seconds that close() waits for queued pages to be stored, and for the store


class PageStore(Protocol):
    """Store of pages by key. One thread calls all methods; they may be slow."""

    timeout: float  # seconds that a request waits for a look-up

    def has(self, key: bytes) -> bool: ...

    def get(self, key: bytes) -> PageRows:
        """Returns the page; ValueError says why it cannot."""

    def put(self, key: bytes, row: PageRows) -> bool:
        """True if the page is stored."""

    def close(self) -> None: ...


StoreOperation = Callable[[PageStore], None]


class AsyncStoreConnector(KVConnector):
    """Connector of one store, which a thread of its own starts and calls, so that the engine does not block."""

    has_lookup = True

    def __init__(self, name: str, begin: Callable[[], PageStore], words: int) -> None:
        """begin: starts the store; called by the thread. Its exceptions are raised here."""
        super().__init__()
        self.name, self.words = name, words
        self._asks, self._writes = deque[StoreOperation](), deque[tuple[bytes, PageRows]]()
        self._queued, self._queued_bytes = set[bytes](), 0  # of pages that wait to be stored
        self._wake = threading.Condition()  # guards all above
        self._closing: float | None = None  # time.monotonic() when it gives up
        self._busy: float | None = None  # since when the store runs an operation
        self._silent = False  # the log has a warning that it fails
        self._counts = dict.fromkeys(("kept", "not_kept"), 0)
        begun = Future[PageStore]()
        self._thread = threading.Thread(target=self._run, args=(begin, begun), name="quintet-pages", daemon=True)
        self._thread.start()
        try:
            self._patience = begun.result(START_SECONDS).timeout
        except TooLate:
            self._closing = 0.0
            raise ValueError(
                f"{name} has not begun within {START_SECONDS:g} s; see whether what it connects to is there"
            ) from None

    def has(self, key: bytes) -> bool:
        return False  # so that no stale answer is used; _write() asks the store before it stores a page

    def look_up(self, keys: Sequence[bytes]) -> Lookup:
        if self.is_stuck:
            return StoreLookup(self, keys, 0.0)
        lookup = StoreLookup(self, keys, self._patience)
        self._ask(lookup.run)
        return lookup

    def load(self, keys: Sequence[bytes]) -> Load:
        return ThreadedLoad(self, keys, self.changed)

    def read(self, key: bytes, then: Callable[[PageRows | str], None]) -> None:
        self._ask(partial(self._read, key, then))

    def store(self, keys: Sequence[bytes], rows: PageRows) -> None:
        with self._wake:
            for key, row in zip(keys, rows, strict=True):
                if key in self._queued:
                    continue
                if self._queued_bytes + row.nbytes > MAX_QUEUED_BYTES:
                    self._counts["not_kept"] += 1
                    continue
                self._queued.add(key)
                self._queued_bytes += row.nbytes
                self._writes.append((key, row))
            self._wake.notify()

    def clear(self) -> None:
        """Clears the queue; stored pages stay, since they may be another engine's."""
        with self._wake:
            self._writes.clear()
            self._queued.clear()
            self._queued_bytes = 0

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        with self._wake:
            if self._closing is None:
                self._closing = time.monotonic() + CLOSE_SECONDS
            self._wake.notify()
        self._thread.join(CLOSE_SECONDS / 10 if self.is_stuck else 1.1 * CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s does not end; what waited to be kept there is lost", self.name)

    @property
    def is_stuck(self) -> bool:
        """Returns whether the store has been busy with one operation for longer than a request waits."""
        since = self._busy
        return since is not None and time.monotonic() - since > self._patience

    def _ask(self, job: StoreOperation) -> None:
        with self._wake:
            self._asks.append(job)
            self._wake.notify()

    # --------------------------------------------------------------------------------------------------- in the thread

    def _run(self, begin: Callable[[], PageStore], begun: Future[PageStore]) -> None:
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

    def _next(self) -> StoreOperation | None:
        """Returns the next operation; None: the thread ends."""
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

    def _read(self, key: bytes, then: Callable[[PageRows | str], None], store: PageStore) -> None:
        try:
            row: PageRows | str = store.get(key)
        except Exception as error:
            row = f"{self.name}: {error}"
        then(row)

    def _write(self, key: bytes, row: PageRows, store: PageStore) -> None:
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
    """Look-up that ends at the first missing page: pages after it are of no use without it."""

    def __init__(self, late: AsyncStoreConnector, keys: Sequence[bytes], patience: float) -> None:
        self._keys, self._changed = keys, late.changed
        self._until = time.monotonic() + patience
        self._count = 0  # leading pages that the store has
        self._done = False

    @property
    def found(self) -> list[bool] | None:
        if not self._done and time.monotonic() < self._until:
            return None
        self._done = True
        count = self._count
        return [at < count for at in range(len(self._keys))]

    def cancel(self) -> None:
        self._done = True

    def run(self, store: PageStore) -> None:
        """Runs the look-up, in the store's thread."""
        try:
            for key in self._keys:
                if self._done or not store.has(key):
                    break
                self._count += 1
        finally:
            self._done = True
            self._changed.set()
