"""Pages that a transfer library reads from a producer's memory; what it must know comes by the page connection."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import REGION, PeerChannel, ProtocolError, RegionAddress
from quintet.engine.kv_transfer.p2p.remote_memory import pages_per_request

logger = logging.getLogger(__name__)

MAX_BUFFERS = 8  # receive buffers: one for each of four threads, and as many for transfers that were given up
MAX_WIDTHS = 4  # row widths of producers, each with receive buffers
MIN_POLL, MAX_POLL = 1e-4, 2e-3  # seconds between two looks at a transfer
CLOSE_SECONDS = 5.0  # seconds that an engine which ends waits for its transfers
CLOSE_POLL = 0.1  # seconds between two looks at those that did not end by then


class RdmaRead(Protocol):
    """Transfer that was started."""

    def done(self) -> bool:
        """Returns whether all data has arrived. ProtocolError: it will not, and the library writes nothing more."""

    def cancel(self) -> bool:
        """Gives the transfer up -> whether the library has released the memory that it wrote to."""


class TransferEngine(Protocol):
    """Transfer library, which moves bytes from process to process. Any thread may call any method."""

    def register_source(self, rows: PageRows) -> None:
        """Lets others read this memory from now on."""

    def register_buffer(self, rows: PageRows) -> None:
        """Registers memory that reads may write to. ProtocolError: it cannot."""

    def metadata(self) -> bytes:
        """Returns the data that another engine needs to read here."""

    def connect(self, metadata: bytes) -> str:
        """Connects to an engine by its mover's data -> the library's name for it. ProtocolError: it has none."""

    def disconnect(self, peer: str) -> None:
        """Releases a peer that meet() has returned."""

    def start_read(self, peer: str, addresses: Sequence[int], into: PageRows) -> RdmaRead:
        """Starts to read a row from each address, one behind the other. ProtocolError: it cannot."""

    def close(self) -> None:
        """Closes the library; none of its transfers may still run."""


def check_not_closed(library: Any) -> Any:
    """Returns the library of a mover; ProtocolError once it was closed."""
    if library is None:
        raise ProtocolError("the engine ends")
    return library


class ExposedRegion:
    """A producer's memory, which others read by the mover."""

    def __init__(self, mover: TransferEngine, rows: PageRows) -> None:
        self._mover, self._rows = mover, rows
        mover.register_source(rows)

    def __call__(self, channel: PeerChannel) -> None:
        channel.send(RegionAddress(self._mover.metadata(), self._rows.ctypes.data, len(self._rows)))


class ReceiveBuffers:
    """Receive buffers of a consumer, into which the mover writes; made as they are needed, up to MAX_BUFFERS."""

    def __init__(self, mover: TransferEngine, words: int) -> None:
        self._mover, self._shape = mover, (pages_per_request(words), words)
        self._free: list[PageRows] = []
        self._stuck: list[tuple[RdmaRead, PageRows]] = []
        self._lock, self._made = threading.Lock(), 0
        self.closed = False

    def acquire(self) -> PageRows:
        """Returns a free buffer. ProtocolError: too many transfers do not end, or the engine does."""
        with self._lock:
            if self.closed:
                raise ProtocolError("the engine ends")
            self._recover()
            if self._free:
                return self._free.pop()
            if self._made >= MAX_BUFFERS:
                raise ProtocolError(f"{MAX_BUFFERS} transfers before it were given up, and have not ended")
            self._made += 1
        rows = np.zeros(self._shape, np.int32)
        try:
            self._mover.register_buffer(rows)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        return rows

    def release(self, rows: PageRows, moving: RdmaRead | None) -> None:
        """Takes a buffer back. moving: a transfer that was given up, and may still write there."""
        with self._lock:
            if moving is None or moving.cancel():
                self._free.append(rows)
            else:
                self._stuck.append((moving, rows))

    def close(self, seconds: float, pause: float = MAX_POLL) -> bool:
        """Makes waiting transfers give up -> whether, within so many seconds, no transfer writes here any more."""
        until = time.monotonic() + seconds
        self.closed = True
        while (used := self._used()) and time.monotonic() < until:
            time.sleep(pause)
        return not used

    def _used(self) -> bool:
        """Returns whether a buffer is borrowed, or written to."""
        with self._lock:
            self._recover()
            return len(self._free) < self._made

    def _recover(self) -> None:
        """Frees the buffers that the library has released."""
        still = [(moving, rows) for moving, rows in self._stuck if not moving.cancel()]
        self._free += [rows for moving, rows in self._stuck if all(rows is not each for _, each in still)]
        self._stuck = still


class ReceiveBufferPool:
    """Receive buffers for each row width of the producers."""

    def __init__(self, mover: TransferEngine) -> None:
        self._mover, self._lock = mover, threading.Lock()
        self._found: dict[int, ReceiveBuffers] = {}
        self._ended = False

    def for_width(self, words: int) -> ReceiveBuffers:
        """Returns the buffers for a row width. ProtocolError: rows of too many widths were fetched before, or the
        engine ends."""
        with self._lock:
            if self._ended:
                raise ProtocolError("the engine ends")
            if words not in self._found:
                if len(self._found) >= MAX_WIDTHS:
                    raise ProtocolError(
                        f"memory for rows of {MAX_WIDTHS} other widths is held; start this engine anew for another"
                    )
                self._found[words] = ReceiveBuffers(self._mover, words)
            return self._found[words]

    def close(self) -> None:
        """Closes the mover once it writes nothing any more. If a transfer does not end in time, that happens later, and
        until then a thread keeps the memory that it writes to."""
        with self._lock:
            self._ended = True
        until = time.monotonic() + CLOSE_SECONDS
        used = [each for each in self._found.values() if not each.close(max(0.0, until - time.monotonic()))]
        if not used:
            self._mover.close()
            return
        logger.warning("transfers of pages did not end within %g s; their memory stays until they do", CLOSE_SECONDS)
        threading.Thread(target=self._end_later, args=(used,), name="quintet-ends", daemon=True).start()

    def _end_later(self, used: Sequence[ReceiveBuffers]) -> None:
        for each in used:
            each.close(math.inf, CLOSE_POLL)
        self._mover.close()


class RemoteReads:
    """One producer's memory, as long as one connection to it lasts."""

    def __init__(
        self, channel: PeerChannel, words: int, mover: TransferEngine, stagings: ReceiveBufferPool, patience: float
    ) -> None:
        """words: int32 words of the producer's rows. patience: seconds that one transfer may take."""
        self._channel, self._mover, self._buffers, self._patience = channel, mover, stagings.for_width(words), patience
        memory = channel.receive(REGION)
        self._base, self._count = memory.address, memory.rows
        self._peer = mover.connect(memory.metadata)

    def read(self, rows: Sequence[int]) -> PageRows:
        if max(rows) >= self._count:
            raise ProtocolError("a page that lies nowhere")
        into, moving = self._buffers.acquire(), None
        try:
            addresses = [self._base + row * into.strides[0] for row in rows]
            moving = self._mover.start_read(self._peer, addresses, into[: len(rows)])
            self._wait(moving)
            moving = None
            return into[: len(rows)].copy()
        finally:
            self._buffers.release(into, moving)

    def _wait(self, moving: RdmaRead) -> None:
        """Waits for a transfer. ProtocolError: it fails, takes too long, or the connection ends, which a library may
        not notice."""
        until, pause = time.monotonic() + self._patience, MIN_POLL
        while not moving.done():
            if time.monotonic() > until:
                raise ProtocolError("a transfer did not end in time")
            if self._buffers.closed:
                raise ProtocolError("the engine ends")
            self._channel.check_open()
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL)

    def close(self) -> None:
        with suppress(ProtocolError):
            self._mover.disconnect(self._peer)
