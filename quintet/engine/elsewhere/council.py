"""What ranks that are processes agree on between steps: whose pages all of them can find, and what has come to all.

All plan alike, so none may know of a page before the others do. Whatever answers when it does (a disk, another engine)
answers to each rank at a moment of its own: that is told here, and counts once every rank has told it.
"""

import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec
import numpy as np

from quintet.engine.elsewhere.connector import Arrived, Load, Rows
from quintet.engine.request import Request
from quintet.platforms.interface import Channel

PIECE = 990  # bytes of a note that ranks exchange at once; a longer one takes several
WHY = 300  # characters of why a page does not come
Bits = np.ndarray[Any, np.dtype[np.bool_]]
LOOKED_UP = 64  # requests whose pages are looked up in one meeting
AHEAD = 2  # times what is taken in at once: so many pages a rank may be ahead of the slowest, in all loads together


class Said(msgspec.Struct, array_like=True):
    """By one rank in one meeting."""

    lie: list[bytes]  # bits by page, of each request that is looked up: whether it is there for this rank
    came: list[bytes]  # bits by place, of each load: what has come to this rank
    failed: list[bytes]  # and what will not
    known: list[int]  # of each load: places of which this rank has heard the one or the other so far
    why: str  # one of the reasons


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Said).decode


class Council:
    """Called by every rank's engine at the same places of the same steps."""

    def __init__(self, channel: Channel, patience: float) -> None:
        """patience: seconds until a rank gives up what has not come to it."""
        self._channel, self._patience = channel, patience
        self._loads: list[Agreed] = []
        self._asked: dict[Request, list[bool]] = {}

    @property
    def due(self) -> bool:
        """Whether there is something to agree on; all have the same answer."""
        self._loads = [load for load in self._loads if not load.done]
        return bool(self._loads or self._asked)

    def agreed(self, load: Load, count: int) -> "Agreed":
        """The same load of so many pages, which gives what has come to every rank."""
        self._loads.append(Agreed(load, count, self._patience))
        return self._loads[-1]

    def look_up(self, request: Request, lie: Callable[[], list[bool]]) -> None:
        """At the next meeting: which of a request's pages every rank has. Some wait for the one after it."""
        if request not in self._asked and len(self._asked) < LOOKED_UP:
            self._asked[request] = lie()

    def forget(self, request: Request | None = None) -> None:
        """It has ended; or, without one, all begin again."""
        if request is not None:
            self._asked.pop(request, None)
            return
        self._asked.clear()
        for load in self._loads:
            load.cancel()

    def meet(self, most: int) -> dict[Request, list[bool]]:
        """Waits for every rank; afterwards loads give what is agreed on -> which pages of each request all have. most:
        pages that this rank takes in of each load before. A rank that is far ahead takes in less, and leaves the rest
        where it waits by itself; the slowest always goes on, whatever pages it has, so that some rank always does."""
        asked, self._asked = self._asked, {}
        share = max(1, AHEAD * most // max(len(self._loads), 1))
        for load in self._loads:
            load.gather(min(most, share - load.ahead))
        why = next((why for load in self._loads for why in load.failed.values()), "")[:WHY]
        bits = ([load.bits(load.rows) for load in self._loads], [load.bits(load.failed) for load in self._loads])
        known = [load.known for load in self._loads]
        note = _encode(Said([_packed(each) for each in asked.values()], *bits, known, why))
        said = [_decode(each) for each in self._exchange(note)]
        named = next((f"rank {rank} of {len(said)}: {each.why}" for rank, each in enumerate(said) if each.why), "")
        for at, load in enumerate(self._loads):
            came = [_unpacked(each.came[at], load.count) for each in said]
            failed = [_unpacked(each.failed[at], load.count) for each in said]
            load.ahead = load.known - min(each.known[at] for each in said)
            load.settle(np.logical_and.reduce(came), np.logical_or.reduce(failed), named)
        return {
            request: np.logical_and.reduce([_unpacked(each.lie[at], len(lie)) for each in said]).tolist()
            for at, (request, lie) in enumerate(asked.items())
        }

    def _exchange(self, note: bytes) -> list[bytes]:
        """What every rank brings, however long it is."""
        first = self._channel.exchange(len(note).to_bytes(4, "little") + note[:PIECE])
        whole = [bytearray(each[4:]) for each in first]
        longest = max(int.from_bytes(each[:4], "little") for each in first)
        for start in range(PIECE, longest, PIECE):
            for rank, more in enumerate(self._channel.exchange(note[start : start + PIECE])):
                whole[rank] += more
        return [bytes(each) for each in whole]


class Agreed(Load):
    """This rank's part of a load that every rank has: a page is given once it has come to all, and fails for all where
    it fails for one."""

    def __init__(self, load: Load, count: int, patience: float) -> None:
        self._load, self.count, self._patience = load, count, patience
        self._left = set(range(count))  # that were not given
        self.rows: dict[int, Rows] = {}  # that have come to this rank
        self.failed: dict[int, str] = {}  # that will not
        self.known = 0  # pages that have come to this rank, or will not
        self.ahead = 0  # how many more they are than the slowest rank's
        self._ready: list[int] = []
        self._lost: dict[int, str] = {}
        self._heard = time.monotonic()
        self._none: Rows = np.zeros((0, 0), np.int32)

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> Arrived:
        places, self._ready = self._ready[:most], self._ready[most:]
        lost, self._lost = self._lost, {}
        rows = np.stack([self.rows.pop(place) for place in places]) if places else self._none
        self._left.difference_update(places, lost)
        return Arrived(places, rows, lost)

    def cancel(self) -> None:
        self._load.cancel()
        self._left.clear()
        self.rows.clear()
        self._ready.clear()

    # -------------------------------------------------------------------------------------------------- the council's

    def gather(self, most: int) -> None:
        """Takes in what has come to this rank; with nothing to take, it waits for others, and loses no patience."""
        if self._load.done:
            return
        if most <= 0:
            self._heard = time.monotonic()
            return
        came = self._load.take(most)
        self._none = came.rows[:0]
        found = zip(came.places, came.rows, strict=True)
        self.rows.update((place, row) for place, row in found if place in self._left)
        self.failed.update(came.failed)
        self.known += len(came.places) + len(came.failed)
        if came.places or came.failed:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._patience:
            self._load.cancel()
            late, self.known = self._left.difference(self.rows, self.failed), self.count
            self.failed.update(dict.fromkeys(late, f"nothing more came within {self._patience:g} s"))

    def bits(self, places: Container[int]) -> bytes:
        return _packed([place in places for place in range(self.count)])

    def settle(self, came: Bits, failed: Bits, why: str) -> None:
        """By what all ranks have said."""
        self._lost = {place: why for place in sorted(self._left) if failed[place]}
        self._ready = [place for place in sorted(self._left) if came[place] and not failed[place]]
        for place in self._lost:
            self.rows.pop(place, None)


def _packed(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, np.bool_)).tobytes()


def _unpacked(said: bytes, count: int) -> Bits:
    return np.unpackbits(np.frombuffer(said, np.uint8), count=count).astype(np.bool_)
