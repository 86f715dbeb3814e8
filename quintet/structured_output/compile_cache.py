"""Something slow that is done once for each text, in a few threads beside the caller, and remembered."""

# The size of a compiled grammar is estimated: llguidance does not report it. Its text is taken in at ENTRY_BYTES and
# BYTES_PER_CHARACTER; its lexer grows while masks are made, at BYTES_PER_SECOND of them, up to MAX_STATES. What reports
# its size (num_bytes) is taken in at that.

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

THREADS = 2  # more would take the cores that steps are launched from
ENTRIES = 256
MAX_BYTES = 256 * 2**20  # of all that is remembered, by estimate
ENTRY_BYTES = 2**14
BYTES_PER_CHARACTER = 50  # measured with schemas of 1 kB to 1 MB
BYTES_PER_SECOND = 400 * 2**20  # measured: 200 to 400 MB
MAX_GROWTH = 32 * 2**20  # of one entry: compile_worker.MAX_STATES states of about 0.5 kB


class CompileTimeout(Exception):
    """A call that did not begin in time: no request waits for it any more."""


class CompileCache:
    """Call it with a text for the Future of make(text). At most THREADS threads, which no exit waits for."""

    def __init__(self, make: Callable[[str], Any], seconds: float) -> None:
        """A text that was not begun within `seconds` fails with CompileTimeout, and is forgotten."""
        self._make, self.seconds = make, seconds
        self._jobs: queue.SimpleQueue[tuple[str, Future[Any], float] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of what follows
        self._known: OrderedDict[str, Future[Any]] = OrderedDict()  # the last used at the end
        self._growth: dict[str, int] = {}  # bytes, of what has grown since it was made
        self.num_bytes = 0  # of all that is remembered

    def __call__(self, text: str) -> "Future[Any]":
        with self._lock:
            future = self._known.pop(text, None)
            if future is None:
                future = Future()
                self.num_bytes += _size(text)
                self._jobs.put((text, future, time.monotonic() + self.seconds))
                self._add_thread()
            self._known[text] = future
            self._evict()
        return future

    def grow(self, text: str, future: "Future[Any]", seconds: float) -> None:
        """Counts work on what was made of a text: so many seconds of a processor have made it larger."""
        self._add(text, future, int(seconds * BYTES_PER_SECOND))

    def _add(self, text: str, future: "Future[Any]", num_bytes: int) -> None:
        with self._lock:
            if self._known.get(text) is future:
                before = self._growth.get(text, 0)
                self._growth[text] = min(MAX_GROWTH, before + num_bytes)
                self.num_bytes += self._growth[text] - before
                self._evict()

    def forget(self, text: str, future: "Future[Any]") -> None:
        """Drops what was made of a text, so that the next caller has it made anew."""
        with self._lock:
            if self._known.get(text) is future:
                self._drop(text)

    def _evict(self) -> None:
        while len(self._known) > ENTRIES or (self.num_bytes > MAX_BYTES and len(self._known) > 1):
            self._drop(next(iter(self._known)))

    def _drop(self, text: str) -> None:
        del self._known[text]
        self.num_bytes -= _size(text) + self._growth.pop(text, 0)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _add_thread(self) -> None:
        if len(self._threads) < THREADS:
            self._threads.append(threading.Thread(target=self._work, name="quintet-grammar", daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            text, future, deadline = job
            try:
                if time.monotonic() > deadline:
                    raise CompileTimeout
                made = self._make(text)
            except BaseException as error:  # who waits shall hear of it; a panic of a library's is no Exception
                if isinstance(error, CompileTimeout):
                    self.forget(text, future)
                future.set_exception(error)
            else:
                self._add(text, future, getattr(made, "num_bytes", 0))
                future.set_result(made)


def _size(text: str) -> int:
    return ENTRY_BYTES + BYTES_PER_CHARACTER * len(text)
