"""Consumer of pages: fetches them from other engines in a few threads; they wait for the engine in a bounded queue."""

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np
from msgspec import structs

from quintet.engine.kv_transfer.connector import Load, LoadedPages, PageRows
from quintet.engine.kv_transfer.head_slices import HeadSlice, ProducerShare
from quintet.engine.kv_transfer.p2p.load_queue import LoadQueue, QueuedLoad, origin_of
from quintet.engine.kv_transfer.p2p.protocol import (
    RESPONSE,
    UNCHANGED,
    LeaseDone,
    MissingPages,
    Page,
    PageFormat,
    PageOffer,
    PagePart,
    PageRequest,
    PagesCopied,
    PeerChannel,
    ProtocolError,
)
from quintet.engine.kv_transfer.p2p.remote_memory import OpenRegion, RemoteRegion, pages_per_request
from quintet.ops.pages import WORD

logger = logging.getLogger(__name__)

NUM_THREADS = 4  # loads that run at once, from hosts that have proved to have the key
NUM_TRIES = 8  # loads from other hosts that run at once, which a request may have named to no purpose
TRIES_SHARE = 6  # of these for one caller
MAX_PAUSE = 60.0  # seconds that a load waits for the engine to take pages; ranks may run loads in different orders


class LeaseAddress(Protocol):
    """Address of a loan at another engine."""

    @property
    def lease(self) -> str: ...

    @property
    def host_port(self) -> str: ...


class PageOrigin(NamedTuple):
    """One process that sends pages, or parts of them."""

    address: LeaseAddress
    part: PagePart | None = None  # its part of them; None: the same part as this process
    share: ProducerShare | None = None  # None: its rows are like this process's

    @property
    def head_slice(self) -> HeadSlice | None:
        return None if self.share is None else self.share.head_slice

    @property
    def has_data(self) -> bool:
        """Returns whether it has data that this process needs; if not, this process only reports at the end that it may
        drop the loan."""
        return self.head_slice is None or bool(self.head_slice.source_ranges)


class Route(NamedTuple):
    """Connection settings: how to connect, and the facts, key and transport to use."""

    connect: Callable[[LeaseAddress], PeerChannel]  # ProtocolError says why not
    page_format: Callable[[], PageFormat]
    key: bytes
    words: int  # of a row
    open_region: OpenRegion | None = None  # opens the producer's memory that holds pages; None: they come in frames
    transport: str = ""  # transport of pages, if not frames


class PageClient:
    """Consumer: owns the threads that fetch pages. `changed` is set when a load has something to return."""

    def __init__(self, way: Route, changed: threading.Event) -> None:
        self._route, self._changed = way, changed
        self._queue = LoadQueue(TRIES_SHARE)
        self._loads: WeakSet[PeerLoad] = WeakSet()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._threads = [
            threading.Thread(target=self._run_loads, args=(index < NUM_THREADS,), name="quintet-takes", daemon=True)
            for index in range(NUM_THREADS + NUM_TRIES)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, sources: Sequence[PageOrigin], keys: Sequence[bytes], ends: bool, caller: bytes = b"") -> "PeerLoad":
        """Starts to load these pages, of which each source has a part. ends: if all of them arrive, the loan will not
        be asked for again, and is released. caller: who named the sources."""
        load = PeerLoad(sources, keys, ends, self._route.words, self._changed, caller)
        self._loads.add(load)
        self._queue.put(load)
        return load

    def counts(self) -> Mapping[str, float]:
        with self._lock:
            return {**self._counts, "seconds": self._seconds}

    def close(self) -> None:
        """Cancels all loads, and ends the threads."""
        for load in self._loads:
            if not load.done:  # one that has all is about to report it
                load.cancel()
        self._queue.close()

    def _run_loads(self, known: bool) -> None:
        while (load := self._queue.take(known)) is not None:
            assert isinstance(load, PeerLoad)
            began = time.monotonic()
            try:
                self._take(load)
            except ProtocolError as error:
                load.fail(f"{load.current_address.host_port}: {error}")
            except Exception as error:
                logger.exception("taking pages from %s broke", load.current_address.host_port)
                load.fail(f"{load.current_address.host_port}: {type(error).__name__}: {error}")
            if not known:
                self._queue.tried(load.origin)
            with self._lock:
                self._counts.update(load.counts())
                self._seconds += time.monotonic() - began

    def _take(self, load: "PeerLoad") -> None:
        if load.canceled:
            return
        with contextlib.ExitStack() as stack:
            givers = [self._connect(load, source, stack) for source in load.sources if source.has_data]
            most = min(pages_per_request(max(self._route.words, giver.words)) for giver in givers)
            most = max(1, most // len(givers))  # the last of them waits until the others were received
            for first in range(0, len(load.keys), most):
                if not load.wait_for_room(most):
                    return
                self._load_pages(load, range(first, min(first + most, len(load.keys))), givers)
            if load.release and load.wait_for_room(1) and not load.num_failed:
                for giver in givers:
                    giver.release_lease(load)
                for source in load.sources:
                    if not source.has_data:
                        self._release_unused(load, source)

    def _release_unused(self, load: "PeerLoad", source: PageOrigin) -> None:
        """Lets a source drop the loan that has no data needed here; if the source is gone, nothing is lost."""
        with contextlib.suppress(ProtocolError), contextlib.ExitStack() as stack:
            self._connect(load, source, stack).release_lease(load)

    def _connect(self, load: "PeerLoad", source: PageOrigin, stack: contextlib.ExitStack) -> "ProducerConnection":
        way, load.current_address, began = self._route, source.address, time.monotonic()
        try:
            channel = way.connect(source.address)
            stack.callback(channel.close)
            facts = way.page_format()
            channel.connect_producer(
                way.key, facts if source.part is None else structs.replace(facts, part=source.part), way.transport
            )
        except ProtocolError:
            self._queue.note_failed(source.address.host_port, time.monotonic() - began)
            raise
        self._queue.note_proved(source.address.host_port)
        giver = ProducerConnection(source, channel, way.words if source.head_slice is None else source.head_slice.words)
        if (
            way.open_region is not None
        ):  # also where nothing is wanted: unread data at the close could cost the Done message
            giver.region = way.open_region(channel, giver.words)
            stack.callback(giver.region.close)
        return giver

    def _load_pages(self, load: "PeerLoad", places: range, givers: Sequence["ProducerConnection"]) -> None:
        """Loads these pages: asks all producers before it receives the first answer."""
        pieces = PartialPages(load, places, self._route.words, len(givers))
        keys = [load.keys[place] for place in places]
        for giver in givers:
            giver.request_pages(load, keys)
        for giver in givers:
            giver.receive_pages(load, pieces)


class PartialPages:
    """A few pages, and the parts of each that have arrived."""

    def __init__(self, load: "PeerLoad", places: range, words: int, parts: int) -> None:
        """parts: number of parts that make a page."""
        self._load, self.indices, self._words, self._parts = load, places, words, parts
        self._rows: dict[int, PageRows] = {}
        self._came: Counter[int] = Counter()

    def add_part(self, at: int, piece: PageRows, cut: HeadSlice | None) -> None:
        """Adds one part, as bytes, of the page at this index of the places."""
        if cut is None:
            self._load.add_page(self.indices[at], piece.view(np.int32))
            return
        if at not in self._rows:
            self._rows[at] = np.zeros(self._words, np.int32)
        content = self._rows[at].view(np.uint8)
        for place, come, nbytes in cut.copies:
            content[place : place + nbytes] = piece[come : come + nbytes]
        self._came[at] += 1
        if self._came[at] == self._parts:
            self._load.add_page(self.indices[at], self._rows.pop(at))


class ProducerConnection:
    """Connection to one source of a load."""

    def __init__(self, source: PageOrigin, channel: PeerChannel, words: int) -> None:
        """words: int32 words of its rows."""
        self._source, self._channel, self.words = source, channel, words
        self.region: RemoteRegion | None = None

    def request_pages(self, load: "PeerLoad", keys: list[bytes]) -> None:
        load.current_address, cut = self._source.address, self._source.head_slice
        self._channel.send(PageRequest(load.address.lease, keys, [] if cut is None else list(cut.source_ranges)))

    def release_lease(self, load: "PeerLoad") -> None:
        load.current_address, share = self._source.address, self._source.share
        readers, reader = (1, 0) if share is None else (share.readers, share.reader)
        self._channel.send(LeaseDone(load.address.lease, readers, reader))

    def receive_pages(self, load: "PeerLoad", pieces: PartialPages) -> None:
        """Receives the answers to all that was asked."""
        load.current_address, places = self._source.address, pieces.indices
        left, lies = set(range(len(places))), dict[int, int]()  # rows in the producer's memory
        while left:
            answer = self._channel.receive(RESPONSE)
            indices = answer.indices if isinstance(answer, MissingPages) else [answer.index]
            if not indices or not left.issuperset(indices) or len(set(indices)) < len(indices):
                raise ProtocolError("an answer to what was not asked")
            left.difference_update(indices)
            if isinstance(answer, MissingPages):
                load.fail_pages(
                    [places[place] for place in indices], f"{load.current_address.host_port}: {answer.reason}"
                )
            elif isinstance(answer, PageOffer):
                lies[answer.index] = answer.row
            else:
                pieces.add_part(answer.index, self._piece(answer), self._source.head_slice)
        if lies:
            self._fetch(lies, pieces)

    def _fetch(self, lies: Mapping[int, int], pieces: PartialPages) -> None:
        """Reads rows from the producer's memory; they count only once the producer confirms that they stayed there."""
        if self.region is None:
            raise ProtocolError("a page that lies nowhere")
        rows, cut = self.region.read(list(lies.values())), self._source.head_slice
        self._channel.send(PagesCopied())
        self._channel.receive(UNCHANGED)
        for at, row in zip(lies, rows.view(np.uint8), strict=True):
            whole = cut is None
            parts = [] if cut is None else [row[first : first + nbytes] for first, nbytes in cut.source_ranges]
            pieces.add_part(at, row if whole else np.concatenate(parts), cut)

    def _piece(self, answer: Page) -> PageRows:
        nbytes = WORD * self.words if self._source.head_slice is None else self._source.head_slice.nbytes
        if len(answer.row) != nbytes:
            raise ProtocolError(f"a page of {len(answer.row)} bytes, where {nbytes} make one")
        return np.frombuffer(answer.row, np.uint8)


class PeerLoad(Load, QueuedLoad):
    """Pages that one thread fetches and the engine takes."""

    def __init__(
        self,
        sources: Sequence[PageOrigin],
        keys: Sequence[bytes],
        ends: bool,
        words: int,
        changed: threading.Event,
        caller: bytes = b"",
    ) -> None:
        self.origin = origin_of([each.address.host_port for each in sources], caller)
        self.sources, self.keys, self.release, self.canceled = sources, list(keys), ends, False
        self.address = self.current_address = sources[0].address  # first source of the loan; source that is being asked
        self._words, self._changed = words, changed
        self._room = threading.Condition()  # guards all that follows
        self._left = set(range(len(keys)))  # places that have not arrived
        self._came: deque[tuple[int, PageRows]] = deque()
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
        """Waits until the engine has taken most of what has arrived; False: the load was canceled. ProtocolError after
        MAX_PAUSE."""
        with self._room:
            if not self._room.wait_for(lambda: self.canceled or len(self._came) < at_once, MAX_PAUSE):
                raise ProtocolError(f"no pages were taken for {MAX_PAUSE:g} s")
            return not self.canceled

    def add_page(self, place: int, row: PageRows) -> None:
        with self._room:
            if not self.canceled:
                self._left.discard(place)
                self._came.append((place, row))
                self._brought += 1
        self._changed.set()

    def fail_pages(self, places: Sequence[int], why: str) -> None:
        with self._room:
            lost = self._left.intersection(places)
            self._left -= lost
            self._failed.update(dict.fromkeys(lost, why))
            self.num_failed += len(lost)
        self._changed.set()

    def fail(self, why: str) -> None:
        """Fails all pages that have not arrived."""
        self.fail_pages(range(len(self.keys)), why)

    def counts(self) -> Mapping[str, int]:
        return {"pages": self._brought, "bytes": 4 * self._words * self._brought, "failed": self.num_failed}
