"""Agreement of rank processes between steps: which pages all ranks can find, and which pages have arrived on all.

All ranks plan the same steps, so no rank may use a page before the others know of it. A disk or another engine answers
each rank at a different time: each rank reports its answers here, and an answer counts once every rank has reported it.
"""

import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import msgspec
import numpy as np

from quintet.engine.kv_transfer.connector import Load, LoadedPages, PageRows
from quintet.engine.request import Request
from quintet.interface.platform import Channel

CHUNK_BYTES = 990  # bytes of a note that ranks exchange at once; a longer one takes several
MAX_REASON = 300  # characters of why a page does not come
Bits = np.ndarray[Any, np.dtype[np.bool_]]
MAX_LOOKUPS = 64  # requests that are looked up in one meeting
MAX_LEAD = 2  # times the pages taken at once: so far may a rank be ahead of the slowest, in all loads together


class RankReport(msgspec.Struct, array_like=True):
    """Report of one rank in one meeting."""

    found: list[bytes]  # bits by page, for each request that is looked up: whether this rank has it
    arrived: list[bytes]  # bits by place, for each load: pages that have arrived at this rank
    failed: list[bytes]  # and pages that will not arrive
    num_known: list[int]  # for each load: number of places that have arrived or failed on this rank so far
    reason: str  # one of the reasons for a failure


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(RankReport).decode


class RankAgreement:
    """Agreement of the ranks; every rank's engine calls it at the same points of the same steps."""

    def __init__(self, channel: Channel, patience: float) -> None:
        """patience: seconds until a rank gives up pages that have not arrived."""
        self._channel, self._patience = channel, patience
        self._loads: list[AgreedLoad] = []
        self._asked: dict[Request, list[bool]] = {}

    @property
    def has_work(self) -> bool:
        """Returns whether there is something to agree on; the result is the same on all ranks."""
        self._loads = [load for load in self._loads if not load.done]
        return bool(self._loads or self._asked)

    def agreed_load(self, load: Load, count: int) -> "AgreedLoad":
        """Returns the load, of `count` pages, as one that returns only pages that have arrived on every rank."""
        self._loads.append(AgreedLoad(load, count, self._patience))
        return self._loads[-1]

    def look_up(self, request: Request, lie: Callable[[], list[bool]]) -> None:
        """Asks, at the next meeting, which pages of a request every rank has. Requests beyond MAX_LOOKUPS wait for a
        later one."""
        if request not in self._asked and len(self._asked) < MAX_LOOKUPS:
            self._asked[request] = lie()

    def drop(self, request: Request | None = None) -> None:
        """Drops a request that has ended; without one, drops all look-ups and cancels all loads."""
        if request is not None:
            self._asked.pop(request, None)
            return
        self._asked.clear()
        for load in self._loads:
            load.cancel()

    def exchange(self, most: int) -> dict[Request, list[bool]]:
        """Exchanges reports with every rank; afterwards loads return agreed pages -> which pages of each request all
        have. most: pages that this rank takes of each load before. A rank far ahead takes fewer, and leaves the rest in
        its load; the slowest always goes on, whatever pages it has, so that some rank always does."""
        asked, self._asked = self._asked, {}
        share = max(1, MAX_LEAD * most // max(len(self._loads), 1))
        for load in self._loads:
            load.gather(min(most, share - load.lead))
        why = next((why for load in self._loads for why in load.failed.values()), "")[:MAX_REASON]
        bits = ([load.pack(load.rows) for load in self._loads], [load.pack(load.failed) for load in self._loads])
        known = [load.num_known for load in self._loads]
        note = _encode(RankReport([_pack_bits(each) for each in asked.values()], *bits, known, why))
        notes = [_decode(each) for each in self._exchange(note)]
        named = next(
            (f"rank {rank} of {len(notes)}: {each.reason}" for rank, each in enumerate(notes) if each.reason), ""
        )
        for at, load in enumerate(self._loads):
            came = [_unpack_bits(each.arrived[at], load.count) for each in notes]
            failed = [_unpack_bits(each.failed[at], load.count) for each in notes]
            load.lead = load.num_known - min(each.num_known[at] for each in notes)
            load.apply_reports(np.logical_and.reduce(came), np.logical_or.reduce(failed), named)
        return {
            request: np.logical_and.reduce([_unpack_bits(each.found[at], len(lie)) for each in notes]).tolist()
            for at, (request, lie) in enumerate(asked.items())
        }

    def _exchange(self, note: bytes) -> list[bytes]:
        """Returns the notes of all ranks, of any length, in rank order."""
        first = self._channel.exchange(len(note).to_bytes(4, "little") + note[:CHUNK_BYTES])
        whole = [bytearray(each[4:]) for each in first]
        longest = max(int.from_bytes(each[:4], "little") for each in first)
        for start in range(CHUNK_BYTES, longest, CHUNK_BYTES):
            for rank, more in enumerate(self._channel.exchange(note[start : start + CHUNK_BYTES])):
                whole[rank] += more
        return [bytes(each) for each in whole]


class AgreedLoad(Load):
    """This rank's part of a load that every rank has: returns a page once it has arrived on all ranks; a page that
    fails on one rank fails on all."""

    def __init__(self, load: Load, count: int, patience: float) -> None:
        self._load, self.count, self._patience = load, count, patience
        self._left = set(range(count))  # places that were not returned
        self.rows: dict[int, PageRows] = {}  # by place: pages that have arrived at this rank
        self.failed: dict[int, str] = {}  # by place: why a page will not arrive
        self.num_known = 0  # pages that have arrived at this rank, or failed
        self.lead = 0  # how many more these are than the slowest rank's
        self._ready: list[int] = []
        self._lost: dict[int, str] = {}
        self._heard = time.monotonic()
        self._none: PageRows = np.zeros((0, 0), np.int32)

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> LoadedPages:
        places, self._ready = self._ready[:most], self._ready[most:]
        lost, self._lost = self._lost, {}
        rows = np.stack([self.rows.pop(place) for place in places]) if places else self._none
        self._left.difference_update(places, lost)
        return LoadedPages(places, rows, lost)

    def cancel(self) -> None:
        self._load.cancel()
        self._left.clear()
        self.rows.clear()
        self._ready.clear()

    # -------------------------------------------------------------------------------------------------- the council's

    def gather(self, most: int) -> None:
        """Takes pages that have arrived at this rank. With `most` <= 0 it waits for other ranks, and its patience
        starts anew."""
        if self._load.done:
            return
        if most <= 0:
            self._heard = time.monotonic()
            return
        came = self._load.take(most)
        self._none = came.rows[:0]
        found = zip(came.indices, came.rows, strict=True)
        self.rows.update((place, row) for place, row in found if place in self._left)
        self.failed.update(came.failed)
        self.num_known += len(came.indices) + len(came.failed)
        if came.indices or came.failed:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._patience:
            self._load.cancel()
            late, self.num_known = self._left.difference(self.rows, self.failed), self.count
            self.failed.update(dict.fromkeys(late, f"nothing more came within {self._patience:g} s"))

    def pack(self, places: Container[int]) -> bytes:
        return _pack_bits([place in places for place in range(self.count)])

    def apply_reports(self, came: Bits, failed: Bits, why: str) -> None:
        """Applies the reports of all ranks."""
        self._lost = {place: why for place in sorted(self._left) if failed[place]}
        self._ready = [place for place in sorted(self._left) if came[place] and not failed[place]]
        for place in self._lost:
            self.rows.pop(place, None)


def _pack_bits(bits: Sequence[bool]) -> bytes:
    return np.packbits(np.array(bits, np.bool_)).tobytes()


def _unpack_bits(packed: bytes, count: int) -> Bits:
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)
