"""Pages that a library fetches out of a giver's memory; what it must know of it comes by the connection of pages."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from quintet.engine.elsewhere.connector import Rows
from quintet.engine.elsewhere.memory import at_once
from quintet.engine.elsewhere.wire import MEMORY, Broken, Channel, Memory

logger = logging.getLogger(__name__)

BUFFERS = 8  # pieces of memory into which pages are fetched: four threads, and as many that nobody waits for any more
WIDTHS = 4  # of givers' rows, for each of which memory is taken
FIRST, LONGEST = 1e-4, 2e-3  # seconds from one look at a transfer to the next
CLOSING = 5.0  # seconds that an engine which ends waits for its transfers
LATER = 0.1  # seconds from one look to the next at those that did not end by then


class Moving(Protocol):
    """A transfer that was begun."""

    def done(self) -> bool:
        """Whether all is there. Broken: it will not be, and the library writes nothing more."""

    def stop(self) -> bool:
        """Nobody waits for it any more -> whether the library has let go of the memory that it wrote to."""


class Mover(Protocol):
    """A library that moves bytes from process to process. Any thread may call anything."""

    def offer(self, rows: Rows) -> None:
        """Others may read this memory from now on."""

    def receive(self, rows: Rows) -> None:
        """What is read may be written there. Broken: it may not."""

    def told(self) -> bytes:
        """What another must know to read here."""

    def meet(self, told: bytes) -> str:
        """What it calls one that told this. Broken: nothing can be read there."""

    def part(self, peer: str) -> None:
        """What was met is not asked any more by who met it."""

    def begin(self, peer: str, addresses: Sequence[int], into: Rows) -> Moving:
        """Reads a row from each address, one behind the other. Broken: it cannot."""

    def close(self) -> None:
        """Of what it began nothing runs any more."""


def unclosed(library: Any) -> Any:
    """What a mover holds of its library; Broken once it was closed."""
    if library is None:
        raise Broken("the engine ends")
    return library


class Lent:
    """A giver's memory, which others read by the mover."""

    def __init__(self, mover: Mover, rows: Rows) -> None:
        self._mover, self._rows = mover, rows
        mover.offer(rows)

    def __call__(self, channel: Channel) -> None:
        channel.send(Memory(self._mover.told(), self._rows.ctypes.data, len(self._rows)))


class Staging:
    """Memory of a taker's, into which the mover writes; taken as it is needed, a bounded number of pieces."""

    def __init__(self, mover: Mover, words: int) -> None:
        self._mover, self._shape = mover, (at_once(words), words)
        self._free: list[Rows] = []
        self._stuck: list[tuple[Moving, Rows]] = []
        self._lock, self._made = threading.Lock(), 0
        self.closed = False

    def borrow(self) -> Rows:
        """Broken: too many transfers do not end, or the engine does."""
        with self._lock:
            if self.closed:
                raise Broken("the engine ends")
            self._recover()
            if self._free:
                return self._free.pop()
            if self._made >= BUFFERS:
                raise Broken(f"{BUFFERS} transfers before it were given up, and have not ended")
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
        """moving: a transfer that nobody waits for any more, and may still write there."""
        with self._lock:
            if moving is None or moving.stop():
                self._free.append(rows)
            else:
                self._stuck.append((moving, rows))

    def close(self, seconds: float, pause: float = LONGEST) -> bool:
        """Whoever waits for a transfer gives it up -> whether, within so many seconds, nobody writes here any more."""
        until = time.monotonic() + seconds
        self.closed = True
        while (used := self._used()) and time.monotonic() < until:
            time.sleep(pause)
        return not used

    def _used(self) -> bool:
        """Whether a piece is lent out, or written to."""
        with self._lock:
            self._recover()
            return len(self._free) < self._made

    def _recover(self) -> None:
        """Pieces that the library has let go of."""
        still = [(moving, rows) for moving, rows in self._stuck if not moving.stop()]
        self._free += [rows for moving, rows in self._stuck if all(rows is not each for _, each in still)]
        self._stuck = still


class Stagings:
    """Of each width that givers' rows have."""

    def __init__(self, mover: Mover) -> None:
        self._mover, self._lock = mover, threading.Lock()
        self._found: dict[int, Staging] = {}
        self._ended = False

    def of(self, words: int) -> Staging:
        """Broken: rows of too many widths were fetched before, or the engine ends."""
        with self._lock:
            if self._ended:
                raise Broken("the engine ends")
            if words not in self._found:
                if len(self._found) >= WIDTHS:
                    raise Broken(
                        f"memory for rows of {WIDTHS} other widths is held; start this engine anew for another"
                    )
                self._found[words] = Staging(self._mover, words)
            return self._found[words]

    def end(self) -> None:
        """Closes the mover once it writes nothing any more. Where a transfer does not end in time that is some time
        from now, and until then a thread keeps the memory that it writes to."""
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


class Moved:
    """One giver's memory, as long as one connection to it lasts."""

    def __init__(self, channel: Channel, words: int, mover: Mover, stagings: Stagings, patience: float) -> None:
        """words: of the giver's rows. patience: seconds that one transfer may take."""
        self._channel, self._mover, self._staging, self._patience = channel, mover, stagings.of(words), patience
        memory = channel.receive(MEMORY)
        self._base, self._count = memory.address, memory.rows
        self._peer = mover.meet(memory.told)

    def read(self, rows: Sequence[int]) -> Rows:
        if max(rows) >= self._count:
            raise Broken("a page that lies nowhere")
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
        """Broken where it fails, takes too long, or the connection ends: a library may not notice who is gone."""
        until, pause = time.monotonic() + self._patience, FIRST
        while not moving.done():
            if time.monotonic() > until:
                raise Broken("a transfer did not end in time")
            if self._staging.closed:
                raise Broken("the engine ends")
            self._channel.look()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)

    def close(self) -> None:
        with suppress(Broken):
            self._mover.part(self._peer)
