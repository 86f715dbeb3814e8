"""Fetches pages from other engines, in a few threads; what comes waits for the engine in a bounded queue."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from quintet.engine.elsewhere.connector import Arrived, Load, Rows
from quintet.engine.elsewhere.memory import Far, Open, at_once
from quintet.engine.elsewhere.wire import (
    ANSWERED,
    KEPT,
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
    open: Open | None = None  # the giver's memory, where pages lie in it; None: they come in frames
    name: str = ""  # how they travel, if not so


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
        channel, far = self._way.connect(load.address), None
        try:
            channel.claim(self._way.key, self._way.facts(), self._way.name)
            far = None if self._way.open is None else self._way.open(channel)
            most = at_once(self._way.words)
            for first in range(0, len(load.keys), most):
                if not load.wait_for_room(most):
                    return
                self._ask(channel, load, range(first, min(first + most, len(load.keys))), far)
            if load.ends and load.wait_for_room(1) and not load.num_failed:
                channel.send(Done(load.address.loan))
        finally:
            if far is not None:
                far.close()
            channel.close()

    def _ask(self, channel: Channel, load: "TakerLoad", places: range, far: Far | None) -> None:
        channel.send(Ask(load.address.loan, [load.keys[place] for place in places]))
        left, lies = set(range(len(places))), dict[int, int]()  # where in the giver's memory
        while left:
            answer = channel.receive(ANSWERED)
            said = answer.places if isinstance(answer, Missing) else [answer.place]
            if not said or not left.issuperset(said) or len(set(said)) < len(said):
                raise Broken("an answer to what was not asked")
            left.difference_update(said)
            if isinstance(answer, Missing):
                load.lack([places[place] for place in said], f"{load.address.place}: {answer.why}")
            elif isinstance(answer, Lies):
                lies[places[answer.place]] = answer.row
            else:
                load.bring(places[answer.place], self._row(answer))
        if lies:
            self._fetch(channel, load, lies, far)

    def _fetch(self, channel: Channel, load: "TakerLoad", lies: Mapping[int, int], far: Far | None) -> None:
        """What lies in the giver's memory; it counts only once the giver says that it lay there all the while."""
        if far is None:
            raise Broken("a page that lies nowhere")
        rows = far.read(list(lies.values()))
        channel.send(Copied())
        channel.receive(KEPT)
        for place, row in zip(lies, rows, strict=True):
            load.bring(place, row)

    def _row(self, answer: Page) -> Rows:
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
