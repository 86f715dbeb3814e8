"""Pages that a transfer library reads from a producer's memory; what it must know comes by the page connection."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from quintet.engine.kv_transfer.connector import Rows
from quintet.engine.kv_transfer.p2p.protocol import MEMORY, Channel, Memory, ProtocolError
from quintet.engine.kv_transfer.p2p.remote_memory import at_once

logger = logging.getLogger(__name__)

BUFFERS = 8  # receive buffers: one for each of four threads, and as many for transfers that were given up
WIDTHS = 4  # row widths of producers, each with receive buffers
FIRST, LONGEST = 1e-4, 2e-3  # seconds between two looks at a transfer
CLOSING = 5.0  # seconds that an engine which ends waits for its transfers
LATER = 0.1  # seconds between two looks at those that did not end by then


class Moving(Protocol):
    """Transfer that was started."""

    def done(self) -> bool:
        """Returns whether all data has arrived. ProtocolError: it will not, and the library writes nothing more."""

    def stop(self) -> bool:
        """Gives the transfer up -> whether the library has released the memory that it wrote to."""


class TransferEngine(Protocol):
    """Transfer library, which moves bytes from process to process. Any thread may call any method."""

    def offer(self, rows: Rows) -> None:
        """Lets others read this memory from now on."""

    def receive(self, rows: Rows) -> None:
        """Registers memory that reads may write to. ProtocolError: it cannot."""

    def told(self) -> bytes:
        """Returns the data that another engine needs to read here."""

    def meet(self, told: bytes) -> str:
        """Connects to an engine by its mover's data -> the library's name for it. ProtocolError: it has none."""

    def part(self, peer: str) -> None:
        """Releases a peer that meet() has returned."""

    def begin(self, peer: str, addresses: Sequence[int], into: Rows) -> Moving:
        """Starts to read a row from each address, one behind the other. ProtocolError: it cannot."""

    def close(self) -> None:
        """Closes the library; none of its transfers may still run."""


def unclosed(library: Any) -> Any:
    """Returns the library of a mover; ProtocolError once it was closed."""
    if library is None:
        raise ProtocolError("the engine ends")
    return library


class ExposedRegion:
    """A producer's memory, which others read by the mover."""

    def __init__(self, mover: TransferEngine, rows: Rows) -> None:
        self._mover, self._rows = mover, rows
        mover.offer(rows)

    def __call__(self, channel: Channel) -> None:
        channel.send(Memory(self._mover.told(), self._rows.ctypes.data, len(self._rows)))


class Staging:
    """Receive buffers of a consumer, into which the mover writes; made as they are needed, up to BUFFERS."""

    def __init__(self, mover: TransferEngine, words: int) -> None:
        self._mover, self._shape = mover, (at_once(words), words)
        self._free: list[Rows] = []
        self._stuck: list[tuple[Moving, Rows]] = []
        self._lock, self._made = threading.Lock(), 0
        self.closed = False

    def borrow(self) -> Rows:
        """Returns a free buffer. ProtocolError: too many transfers do not end, or the engine does."""
        with self._lock:
            if self.closed:
                raise ProtocolError("the engine ends")
            self._recover()
            if self._free:
                return self._free.pop()
            if self._made >= BUFFERS:
                raise ProtocolError(f"{BUFFERS} transfers before it were given up, and have not ended")
            self._made += 1
        rows = np.zeros(self._shape, np.int32)
        try:
            self._mover.receive(rows)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        return rows

    def give_back(self, rows: Rows, moving: Moving | None) -> None:
        """Takes a buffer back. moving: a transfer that was given up, and may still write there."""
        with self._lock:
            if moving is None or moving.stop():
                self._free.append(rows)
            else:
                self._stuck.append((moving, rows))

    def close(self, seconds: float, pause: float = LONGEST) -> bool:
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
        still = [(moving, rows) for moving, rows in self._stuck if not moving.stop()]
        self._free += [rows for moving, rows in self._stuck if all(rows is not each for _, each in still)]
        self._stuck = still


class Stagings:
    """Receive buffers for each row width of the producers."""

    def __init__(self, mover: TransferEngine) -> None:
        self._mover, self._lock = mover, threading.Lock()
        self._found: dict[int, Staging] = {}
        self._ended = False

    def of(self, words: int) -> Staging:
        """Returns the buffers for a row width. ProtocolError: rows of too many widths were fetched before, or the
        engine ends."""
        with self._lock:
            if self._ended:
                raise ProtocolError("the engine ends")
            if words not in self._found:
                if len(self._found) >= WIDTHS:
                    raise ProtocolError(
                        f"memory for rows of {WIDTHS} other widths is held; start this engine anew for another"
                    )
                self._found[words] = Staging(self._mover, words)
            return self._found[words]

    def end(self) -> None:
        """Closes the mover once it writes nothing any more. If a transfer does not end in time, that happens later, and
        until then a thread keeps the memory that it writes to."""
        with self._lock:
            self._ended = True
        until = time.monotonic() + CLOSING
        used = [each for each in self._found.values() if not each.close(max(0.0, until - time.monotonic()))]
        if not used:
            self._mover.close()
            return
        logger.warning("transfers of pages did not end within %g s; their memory stays until they do", CLOSING)
        threading.Thread(target=self._end_later, args=(used,), name="quintet-ends", daemon=True).start()

    def _end_later(self, used: Sequence[Staging]) -> None:
        for each in used:
            each.close(math.inf, LATER)
        self._mover.close()


class RemoteReads:
    """One producer's memory, as long as one connection to it lasts."""

    def __init__(
        self, channel: Channel, words: int, mover: TransferEngine, stagings: Stagings, patience: float
    ) -> None:
        """words: int32 words of the producer's rows. patience: seconds that one transfer may take."""
        self._channel, self._mover, self._staging, self._patience = channel, mover, stagings.of(words), patience
        memory = channel.receive(MEMORY)
        self._base, self._count = memory.address, memory.rows
        self._peer = mover.meet(memory.told)

    def read(self, rows: Sequence[int]) -> Rows:
        if max(rows) >= self._count:
            raise ProtocolError("a page that lies nowhere")
        into, moving = self._staging.borrow(), None
        try:
            addresses = [self._base + row * into.strides[0] for row in rows]
            moving = self._mover.begin(self._peer, addresses, into[: len(rows)])
            self._wait(moving)
            moving = None
            return into[: len(rows)].copy()
        finally:
            self._staging.give_back(into, moving)

    def _wait(self, moving: Moving) -> None:
        """Waits for a transfer. ProtocolError: it fails, takes too long, or the connection ends, which a library may
        not notice."""
        until, pause = time.monotonic() + self._patience, FIRST
        while not moving.done():
            if time.monotonic() > until:
                raise ProtocolError("a transfer did not end in time")
            if self._staging.closed:
                raise ProtocolError("the engine ends")
            self._channel.look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def close(self) -> None:
        with suppress(ProtocolError):
            self._mover.part(self._peer)
