"""Consumer of pages: fetches them from other engines in a few threads; they wait for the engine in a bounded queue."""

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
from msgspec import structs

from quintet.engine.kv_transfer.connector import Load, LoadedPages, Rows
from quintet.engine.kv_transfer.head_slices import HeadSlice, Share
from quintet.engine.kv_transfer.p2p.protocol import (
    ANSWERED,
    KEPT,
    Channel,
    Copied,
    Done,
    Facts,
    Missing,
    Offer,
    Page,
    PageRequest,
    Part,
    ProtocolError,
)
from quintet.engine.kv_transfer.p2p.remote_memory import Open, RemoteRegion, at_once
from quintet.ops.pages import WORD

logger = logging.getLogger(__name__)

THREADS = 4  # loads that run at once


class Address(Protocol):
    """Address of a loan at another engine."""

    @property
    def loan(self) -> str: ...

    @property
    def place(self) -> str: ...


class From(NamedTuple):
    """One process that sends pages, or parts of them."""

    address: Address
    part: Part | None = None  # its part of them; None: the same part as this process
    share: Share | None = None  # None: its rows are like this process's

    @property
    def cut(self) -> HeadSlice | None:
        return None if self.share is None else self.share.cut

    @property
    def wanted(self) -> bool:
        """Returns whether it has data that this process needs; if not, this process only reports at the end that it may
        drop the loan."""
        return self.cut is None or bool(self.cut.wanted)


class Route(NamedTuple):
    """Connection settings: how to connect, and the facts, key and transport to use."""

    connect: Callable[[Address], Channel]  # ProtocolError says why not
    facts: Callable[[], Facts]
    key: bytes
    words: int  # of a row
    open: Open | None = None  # opens the producer's memory that holds pages; None: they come in frames
    name: str = ""  # transport of pages, if not frames


class PageClient:
    """Consumer: owns the threads that fetch pages. `changed` is set when a load has something to return."""

    def __init__(self, way: Route, changed: threading.Event) -> None:
        self._way, self._changed = way, changed
        self._jobs: queue.SimpleQueue[TakerLoad | None] = queue.SimpleQueue()
        self._loads: WeakSet[TakerLoad] = WeakSet()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._threads = [
            threading.Thread(target=self._take_all, name="quintet-takes", daemon=True) for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, sources: Sequence[From], keys: Sequence[bytes], ends: bool) -> "TakerLoad":
        """Starts to load these pages, of which each source has a part. ends: if all of them arrive, the loan will not
        be asked for again, and is released."""
        load = TakerLoad(sources, keys, ends, self._way.words, self._changed)
        self._loads.add(load)
        self._jobs.put(load)
        return load

    def counts(self) -> Mapping[str, float]:
        with self._lock:
            return {**self._counts, "seconds": self._seconds}

    def close(self) -> None:
        """Cancels all loads, and ends the threads."""
        for load in self._loads:
            if not load.done:  # one that has all is about to report it
                load.cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def _take_all(self) -> None:
        while (load := self._jobs.get()) is not None:
            began = time.monotonic()
            try:
                self._take(load)
            except ProtocolError as error:
                load.fail(f"{load.asking.place}: {error}")
            except Exception as error:
                logger.exception("taking pages from %s broke", load.asking.place)
                load.fail(f"{load.asking.place}: {type(error).__name__}: {error}")
            with self._lock:
                self._counts.update(load.counts())
                self._seconds += time.monotonic() - began

    def _take(self, load: "TakerLoad") -> None:
        if load.canceled:
            return
        with contextlib.ExitStack() as stack:
            givers = [self._reach(load, source, stack) for source in load.sources if source.wanted]
            most = min(at_once(max(self._way.words, giver.words)) for giver in givers)
            most = max(1, most // len(givers))  # the last of them waits until the others were received
            for first in range(0, len(load.keys), most):
                if not load.wait_for_room(most):
                    return
                self._bring(load, range(first, min(first + most, len(load.keys))), givers)
            if load.ends and load.wait_for_room(1) and not load.num_failed:
                for giver in givers:
                    giver.forget(load)
                for source in load.sources:
                    if not source.wanted:
                        self._let_forget(load, source)

    def _let_forget(self, load: "TakerLoad", source: From) -> None:
        """Lets a source drop the loan that has no data needed here; if the source is gone, nothing is lost."""
        with contextlib.suppress(ProtocolError), contextlib.ExitStack() as stack:
            self._reach(load, source, stack).forget(load)

    def _reach(self, load: "TakerLoad", source: From, stack: contextlib.ExitStack) -> "ProducerConnection":
        way, load.asking = self._way, source.address
        channel = way.connect(source.address)
        stack.callback(channel.close)
        facts = way.facts()
        channel.claim(way.key, facts if source.part is None else structs.replace(facts, part=source.part), way.name)
        giver = ProducerConnection(source, channel, way.words if source.cut is None else source.cut.words)
        if way.open is not None:  # also where nothing is wanted: unread data at the close could cost the Done message
            giver.far = way.open(channel, giver.words)
            stack.callback(giver.far.close)
        return giver

    def _bring(self, load: "TakerLoad", places: range, givers: Sequence["ProducerConnection"]) -> None:
        """Loads these pages: asks all producers before it receives the first answer."""
        pieces = PartialPages(load, places, self._way.words, len(givers))
        keys = [load.keys[place] for place in places]
        for giver in givers:
            giver.ask(load, keys)
        for giver in givers:
            giver.answer(load, pieces)


class PartialPages:
    """A few pages, and the parts of each that have arrived."""

    def __init__(self, load: "TakerLoad", places: range, words: int, parts: int) -> None:
        """parts: number of parts that make a page."""
        self._load, self.places, self._words, self._parts = load, places, words, parts
        self._rows: dict[int, Rows] = {}
        self._came: Counter[int] = Counter()

    def bring(self, at: int, piece: Rows, cut: HeadSlice | None) -> None:
        """Adds one part, as bytes, of the page at this index of the places."""
        if cut is None:
            self._load.bring(self.places[at], piece.view(np.int32))
            return
        if at not in self._rows:
            self._rows[at] = np.zeros(self._words, np.int32)
        content = self._rows[at].view(np.uint8)
        for place, come, nbytes in cut.places:
            content[place : place + nbytes] = piece[come : come + nbytes]
        self._came[at] += 1
        if self._came[at] == self._parts:
            self._load.bring(self.places[at], self._rows.pop(at))


class ProducerConnection:
    """Connection to one source of a load."""

    def __init__(self, source: From, channel: Channel, words: int) -> None:
        """words: int32 words of its rows."""
        self._source, self._channel, self.words = source, channel, words
        self.far: RemoteRegion | None = None

    def ask(self, load: "TakerLoad", keys: list[bytes]) -> None:
        load.asking, cut = self._source.address, self._source.cut
        self._channel.send(PageRequest(load.address.loan, keys, [] if cut is None else list(cut.wanted)))

    def forget(self, load: "TakerLoad") -> None:
        load.asking, share = self._source.address, self._source.share
        readers, reader = (1, 0) if share is None else (share.readers, share.reader)
        self._channel.send(Done(load.address.loan, readers, reader))

    def answer(self, load: "TakerLoad", pieces: PartialPages) -> None:
        """Receives the answers to all that was asked."""
        load.asking, places = self._source.address, pieces.places
        left, lies = set(range(len(places))), dict[int, int]()  # rows in the producer's memory
        while left:
            answer = self._channel.receive(ANSWERED)
            said = answer.places if isinstance(answer, Missing) else [answer.place]
            if not said or not left.issuperset(said) or len(set(said)) < len(said):
                raise ProtocolError("an answer to what was not asked")
            left.difference_update(said)
            if isinstance(answer, Missing):
                load.lack([places[place] for place in said], f"{load.asking.place}: {answer.why}")
            elif isinstance(answer, Offer):
                lies[answer.place] = answer.row
            else:
                pieces.bring(answer.place, self._piece(answer), self._source.cut)
        if lies:
            self._fetch(lies, pieces)

    def _fetch(self, lies: Mapping[int, int], pieces: PartialPages) -> None:
        """Reads rows from the producer's memory; they count only once the producer confirms that they stayed there."""
        if self.far is None:
            raise ProtocolError("a page that lies nowhere")
        rows, cut = self.far.read(list(lies.values())), self._source.cut
        self._channel.send(Copied())
        self._channel.receive(KEPT)
        for at, row in zip(lies, rows.view(np.uint8), strict=True):
            whole = cut is None
            parts = [] if cut is None else [row[first : first + nbytes] for first, nbytes in cut.wanted]
            pieces.bring(at, row if whole else np.concatenate(parts), cut)

    def _piece(self, answer: Page) -> Rows:
        nbytes = WORD * self.words if self._source.cut is None else self._source.cut.nbytes
        if len(answer.row) != nbytes:
            raise ProtocolError(f"a page of {len(answer.row)} bytes, where {nbytes} make one")
        return np.frombuffer(answer.row, np.uint8)


class TakerLoad(Load):
    """Pages that one thread fetches and the engine takes."""

    def __init__(
        self, sources: Sequence[From], keys: Sequence[bytes], ends: bool, words: int, changed: threading.Event
    ) -> None:
        self.sources, self.keys, self.ends, self.canceled = sources, list(keys), ends, False
        self.address = self.asking = sources[0].address  # first source of the loan; source that is being asked
        self._words, self._changed = words, changed
        self._room = threading.Condition()  # guards all that follows
        self._left = set(range(len(keys)))  # places that have not arrived
        self._came: deque[tuple[int, Rows]] = deque()
        self._failed: dict[int, str] = {}
        self.num_failed = self._brought = 0

    # ---------------------------------------------------------------------------------------------------- the engine's

    @property
    def done(self) -> bool:
        with self._room:
            return not (self._left or self._came or self._failed)

    def take(self, most: int) -> LoadedPages:
        with self._room:
            taken = [self._came.popleft() for _ in range(min(most, len(self._came)))]
            failed, self._failed = self._failed, {}
            self._room.notify_all()
        rows = np.stack([row for _, row in taken]) if taken else np.zeros((0, self._words), np.int32)
        return LoadedPages([place for place, _ in taken], rows, failed)

    def cancel(self) -> None:
        with self._room:
            self.canceled = True
            self._left.clear()
            self._came.clear()
            self._failed.clear()
            self._room.notify_all()

    # ---------------------------------------------------------------------------------------------------- the thread's

    def wait_for_room(self, at_once: int) -> bool:
        """Waits until the engine has taken most of what has arrived; False: the load was canceled."""
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
        """Fails all pages that have not arrived."""
        self.lack(range(len(self.keys)), why)

    def counts(self) -> Mapping[str, int]:
        return {"pages": self._brought, "bytes": 4 * self._words * self._brought, "failed": self.num_failed}
