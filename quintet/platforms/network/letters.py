"""What ranks tell each other over the network, and how each hears that another is gone."""

import contextlib
import hmac
import logging
import queue
import select
import struct
import threading
import time
import weakref
from typing import Protocol

from quintet.platforms.interface import Channel, DeviceLost
from quintet.platforms.network.wire import MOST, Stranger, Wire
from quintet.types import Place

logger = logging.getLogger(__name__)

LETTER, STOP = 4, 5  # kinds of frames
SEAL = 16  # bytes by which each note is signed
LOOK = 0.5  # seconds between two looks at whether this rank has stopped
HASTE = 1.0  # seconds to tell another that nobody waits any more
LATE = 0.2  # seconds for what a rank that has ended sent before by other connections, and for who knows why it has
MOST_REASON = 4096


class Meshed(Protocol):
    """Who carries notes and parts of sums: compiled."""

    def exchange(self, note: bytes) -> list[bytes]: ...

    def stop(self, why: str) -> None: ...

    def stopped(self) -> str: ...


class NetworkLetters(Channel):
    """Rank 0 has a wire to each of the others, and each of these one to rank 0; a thread listens on all of them. A
    connection that ends is a rank that is gone: rank 0 hears of it, and tells the others."""

    def __init__(  # what a meeting gives
        self, mesh: Meshed, place: Place, wires: dict[int, Wire], seal: bytes, seconds: float, lost: type[Exception]
    ) -> None:
        """`seal`: the key that signs notes; `lost`: what the mesh raises where a rank is gone."""
        self._mesh, self._rank, self._size, self._wires = mesh, place.rank, place.size, wires
        self._key, self._seconds, self._raised, self._exchanged = seal, seconds, lost, 0
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: nobody tells any more
        self._passed_on = threading.Lock()  # held by whoever has told the others to stop
        threading.Thread(target=_listen, args=(weakref.ref(self),), name="quintet-ranks", daemon=True).start()

    def tell(self, letter: bytes) -> None:
        self._check()
        until = time.monotonic() + self._seconds
        for rank, wire in self._wires.items():
            try:
                wire.send(LETTER, letter, until, lambda: not self.stopped)
            except OSError as error:
                self._lost(rank, error)

    def hear(self) -> bytes:
        letter = self._heard.get()
        if letter is None:
            self._heard.put(None)  # for whoever asks again
            raise DeviceLost(self.stopped)
        return letter

    def exchange(self, note: bytes) -> list[bytes]:
        self._exchanged += 1
        try:
            notes = self._mesh.exchange(note + self._seal(self._rank, note))
        except self._raised as error:
            self._pass_on()
            raise DeviceLost(str(error)) from None
        found = []
        for rank, each in enumerate(notes):
            text, seal = each[:-SEAL], each[-SEAL:]
            if not hmac.compare_digest(seal, self._seal(rank, text)):
                self._lost(rank, Stranger("a note that it did not sign"))
            found.append(text)
        return found

    def stop(self, why: str) -> None:
        self._mesh.stop(why)
        self._pass_on()

    @property
    def stopped(self) -> str:
        return self._mesh.stopped()

    def _seal(self, rank: int, note: bytes) -> bytes:
        head = struct.pack(">HQ", rank, self._exchanged)
        return hmac.new(self._key, head + note, "sha256").digest()[:SEAL]

    def _check(self) -> None:
        if self.stopped:
            raise DeviceLost(self.stopped)

    def _lost(self, rank: int, error: Exception) -> None:
        """DeviceLost: whoever knew better has said so by now, or this is the reason."""
        if not self.stopped:
            time.sleep(LOOK)
        self.stop(self._gone(rank, error))
        raise DeviceLost(self.stopped)

    def _gone(self, rank: int, error: Exception) -> str:
        why = str(error) or f"it took nothing for {self._seconds:g} s"
        return f"rank {rank} of {self._size} is lost: {why}"

    def _pass_on(self) -> None:
        """Once: all that are connected hear that nobody waits any more, and why."""
        if not self._passed_on.acquire(blocking=False):
            return
        self._heard.put(None)
        said = self.stopped.encode()[:MOST_REASON]
        for wire in self._wires.values():
            with contextlib.suppress(OSError):
                wire.send(STOP, said, time.monotonic() + HASTE)

    def _listen_once(self) -> bool:
        """Whether to go on."""
        by_number = {wire.fileno(): (rank, wire) for rank, wire in self._wires.items() if wire.fileno() >= 0}
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(LOOK * 1000):
            rank, wire = by_number[number]
            try:
                frame = wire.receive(time.monotonic() + self._seconds, MOST, lambda: not self.stopped)
            except OSError as error:
                time.sleep(LATE)
                self._mesh.stop(self._gone(rank, error))
                break
            if frame.kind == STOP:
                self._mesh.stop(frame.payload[:MOST_REASON].decode(errors="replace"))
            elif self._rank:
                self._heard.put(frame.payload)
        if self.stopped:
            self._pass_on()
        return not self.stopped

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()


def _listen(letters: "weakref.ref[NetworkLetters]") -> None:
    """As long as anybody has the channel."""
    while True:
        mine = letters()
        if mine is None or not mine._listen_once():
            return
        del mine
