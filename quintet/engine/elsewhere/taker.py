"""Fetches pages from other engines, in a few threads; what comes waits for the engine in a bounded queue."""

import logging
import mmap
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quintet.engine.elsewhere.connector import Arrived, Load, Rows
from quintet.engine.elsewhere.wire import (
    ANSWERED,
    MOST_KEYS,
    Ask,
    Broken,
    Channel,
    Copied,
    Done,
    Facts,
    Lies,
    Missing,
    Page,
)

logger = logging.getLogger(__name__)

THREADS = 4  # loads that come at once
AHEAD = 2**25  # bytes of a load that wait for the engine, before more is asked for


class Address(Protocol):
    """Where a loan lies."""

    @property
    def loan(self) -> str: ...

    @property
    def place(self) -> str: ...


class Way(NamedTuple):
    """How connections come about, and what is said on them."""

    connect: Callable[[Address], Channel]  # Broken says why not
    facts: Callable[[], Facts]
    key: bytes
    words: int  # of a row
    shared: bool = False  # whether rows lie in memory that the giver shares


class Taker:
    """Owns the threads. `changed` is set when a load has something to give."""

    def __init__(self, way: Way, changed: threading.Event) -> None:
        self._way, self._changed = way, changed
        self._jobs: queue.SimpleQueue[TakerLoad | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._threads = [
            threading.Thread(target=self._take_all, name="quintet-takes", daemon=True) for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, address: Address, keys: Sequence[bytes], ends: bool) -> "TakerLoad":
        """Begins to bring these. ends: nobody will ask for that loan again, if all of them come."""
        load = TakerLoad(address, keys, ends, self._way.words, self._changed)
        self._jobs.put(load)
        return load

    def counts(self) -> Mapping[str, float]:
        with self._lock:
            return {**self._counts, "seconds": self._seconds}

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _take_all(self) -> None:
        while (load := self._jobs.get()) is not None:
            began = time.monotonic()
            try:
                self._take(load)
            except Broken as error:
                load.fail(f"{load.address.place}: {error}")
            except Exception as error:
                logger.exception("taking pages from %s broke", load.address.place)
                load.fail(f"{load.address.place}: {type(error).__name__}: {error}")
            with self._lock:
                self._counts.update(load.counts())
                self._seconds += time.monotonic() - began

    def _take(self, load: "TakerLoad") -> None:
        if load.canceled:
            return
        channel = self._way.connect(load.address)
        try:
            channel.claim(self._way.key, self._way.facts())
            rows = self._mapped(channel) if self._way.shared else None
            at_once = max(1, min(MOST_KEYS, AHEAD // max(4 * self._way.words, 1)))
            for first in range(0, len(load.keys), at_once):
                if not load.wait_for_room(at_once):
                    return
                self._ask(channel, load, range(first, min(first + at_once, len(load.keys))), rows)
            if load.ends and load.wait_for_room(1) and not load.num_failed:
                channel.send(Done(load.address.loan))
        finally:
            channel.close()

    def _mapped(self, channel: Channel) -> Rows:
        """All rows of the giver's memory."""
        descriptor = channel.borrow()
        try:
            size = os.fstat(descriptor).st_size // (4 * self._way.words) * 4 * self._way.words
            memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise Broken(f"the memory that it shares cannot be read: {error}") from None
        finally:
            os.close(descriptor)
        return np.ndarray((size // (4 * self._way.words), self._way.words), np.int32, memory)

    def _ask(self, channel: Channel, load: "TakerLoad", places: range, rows: Rows | None) -> None:
        channel.send(Ask(load.address.loan, [load.keys[place] for place in places]))
        left, lay = set(range(len(places))), False
        while left:
            answer = channel.receive(ANSWERED)
            said = answer.places if isinstance(answer, Missing) else [answer.place]
            if not said or not left.issuperset(said) or len(set(said)) < len(said):
                raise Broken("an answer to what was not asked")
            left.difference_update(said)
            if isinstance(answer, Missing):
                load.lack([places[place] for place in said], f"{load.address.place}: {answer.why}")
            else:
                lay = lay or isinstance(answer, Lies)
                load.bring(places[answer.place], self._row(answer, rows))
        if lay:
            channel.send(Copied())

    def _row(self, answer: Page | Lies, rows: Rows | None) -> Rows:
        if isinstance(answer, Lies):
            if rows is None or answer.row >= len(rows):
                raise Broken("a page that lies nowhere")
            return rows[answer.row].copy()
        if len(answer.row) != 4 * self._way.words:
            raise Broken(f"a page of {len(answer.row)} bytes, where {4 * self._way.words} make one")
        return np.frombuffer(answer.row, np.int32)


class TakerLoad(Load):
    """Pages that one thread brings and the engine takes."""

    def __init__(
        self, address: Address, keys: Sequence[bytes], ends: bool, words: int, changed: threading.Event
    ) -> None:
        self.address, self.keys, self.ends, self.canceled = address, list(keys), ends, False
        self._words, self._changed = words, changed
        self._room = threading.Condition()  # of all that follows
        self._left = set(range(len(keys)))  # that have not come
        self._came: deque[tuple[int, Rows]] = deque()
        self._failed: dict[int, str] = {}
        self.num_failed = self._brought = 0

    # ---------------------------------------------------------------------------------------------------- the engine's

    @property
    def done(self) -> bool:
        with self._room:
            return not (self._left or self._came or self._failed)

    def take(self, most: int) -> Arrived:
        with self._room:
            taken = [self._came.popleft() for _ in range(min(most, len(self._came)))]
            failed, self._failed = self._failed, {}
            self._room.notify_all()
        rows = np.stack([row for _, row in taken]) if taken else np.zeros((0, self._words), np.int32)
        return Arrived([place for place, _ in taken], rows, failed)

    def cancel(self) -> None:
        with self._room:
            self.canceled = True
            self._left.clear()
            self._came.clear()
            self._failed.clear()
            self._room.notify_all()

    # ---------------------------------------------------------------------------------------------------- the thread's

    def wait_for_room(self, at_once: int) -> bool:
        """Until the engine has taken most of what came; False: nobody wants it any more."""
        with self._room:
            self._room.wait_for(lambda: self.canceled or len(self._came) < at_once)
            return not self.canceled

    def bring(self, place: int, row: Rows) -> None:
        with self._room:
            if not self.canceled:
                self._left.discard(place)
                self._came.append((place, row))
                self._brought += 1
        self._changed.set()

    def lack(self, places: Sequence[int], why: str) -> None:
        with self._room:
            lost = self._left.intersection(places)
            self._left -= lost
            self._failed.update(dict.fromkeys(lost, why))
            self.num_failed += len(lost)
        self._changed.set()

    def fail(self, why: str) -> None:
        """What has not come will not."""
        self.lack(range(len(self.keys)), why)

    def counts(self) -> Mapping[str, int]:
        return {"pages": self._brought, "bytes": 4 * self._words * self._brought, "failed": self.num_failed}
