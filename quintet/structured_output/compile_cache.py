"""Something slow that is done once for each text, in a few threads beside the caller, and remembered."""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

THREADS = 2  # more would take the cores that steps are launched from
ENTRIES = 256
CHARACTERS = 2**24  # of all texts that are remembered: what is made of one takes up to fifty times its size


class CompileTimeout(Exception):
    """A call that did not begin in time: no request waits for it any more."""


class CompileCache:
    """Call it with a text for the Future of make(text). At most THREADS threads, which no exit waits for."""

    def __init__(self, make: Callable[[str], Any], seconds: float) -> None:
        """A text that was not begun within `seconds` fails with Late, and is forgotten."""
        self._make, self.seconds = make, seconds
        self._jobs: queue.SimpleQueue[tuple[str, Future[Any], float] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of what follows
        self._known: OrderedDict[str, Future[Any]] = OrderedDict()  # the last used at the end
        self._characters = 0

    def __call__(self, text: str) -> "Future[Any]":
        with self._lock:
            future = self._known.pop(text, None)
            if future is None:
                future = Future()
                self._characters += len(text)
                self._jobs.put((text, future, time.monotonic() + self.seconds))
                self._add_thread()
            self._known[text] = future
            while len(self._known) > ENTRIES or (self._characters > CHARACTERS and len(self._known) > 1):
                self._characters -= len(self._known.popitem(last=False)[0])
        return future

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
                    self._forget(text, future)
                future.set_exception(error)
            else:
                future.set_result(made)

    def _forget(self, text: str, future: "Future[Any]") -> None:
        with self._lock:
            if self._known.get(text) is future:
                del self._known[text]
                self._characters -= len(text)
