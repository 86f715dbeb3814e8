"""Messages between ranks over the network, and detection of ranks that are gone."""

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

from quintet.distributed.connection import MAX_FRAME, AuthenticationFailed, Connection
from quintet.interface.platform import Channel, DeviceLost
from quintet.interface.types import RankInfo

logger = logging.getLogger(__name__)

MESSAGE, ABORT = 4, 5  # kinds of frames
MAC_BYTES = 16  # bytes by which each note is signed
POLL_SECONDS = 0.5  # seconds between two looks at whether this rank has stopped
ABORT_SECONDS = 1.0  # seconds to send another rank the reason to stop
# seconds for what an ended rank has sent by other connections, and for a rank that knows why it ended
GRACE_SECONDS = 0.2
MAX_REASON = 4096


class MessageMesh(Protocol):
    """Mesh that carries notes and parts of sums: compiled."""

    def exchange(self, note: bytes) -> list[bytes]: ...

    def stop(self, why: str) -> None: ...

    def stopped(self) -> str: ...


class RankMessages(Channel):
    """Channel of ranks: rank 0 has a wire to each of the others, and each of these one to rank 0; a thread listens on
    all of them. A connection that ends is a rank that is gone: rank 0 sends the others the reason."""

    def __init__(  # what a meeting gives
        self,
        mesh: MessageMesh,
        rank_info: RankInfo,
        wires: dict[int, Connection],
        seal: bytes,
        seconds: float,
        lost: type[Exception],
    ) -> None:
        """`seal`: the key that signs notes; `lost`: what the mesh raises where a rank is gone."""
        self._mesh, self._rank, self._size, self._connections = mesh, rank_info.rank, rank_info.size, wires
        self._key, self._seconds, self._abort_error, self._exchanged = seal, seconds, lost, 0
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the channel has stopped
        self._abort_sent = threading.Lock()  # held once the others were sent the reason to stop
        threading.Thread(target=_listen_loop, args=(weakref.ref(self),), name="quintet-ranks", daemon=True).start()

    def broadcast(self, message: bytes) -> None:
        self._check()
        until = time.monotonic() + self._seconds
        for rank, wire in self._connections.items():
            try:
                wire.send(MESSAGE, message, until, lambda: not self.aborted)
            except OSError as error:
                self._lost(rank, error)

    def receive(self) -> bytes:
        letter = self._heard.get()
        if letter is None:
            self._heard.put(None)  # for the next call
            raise DeviceLost(self.aborted)
        return letter

    def exchange(self, message: bytes) -> list[bytes]:
        self._exchanged += 1
        try:
            notes = self._mesh.exchange(message + self._seal(self._rank, message))
        except self._abort_error as error:
            self._pass_on()
            raise DeviceLost(str(error)) from None
        found = []
        for rank, each in enumerate(notes):
            text, seal = each[:-MAC_BYTES], each[-MAC_BYTES:]
            if not hmac.compare_digest(seal, self._seal(rank, text)):
                self._lost(rank, AuthenticationFailed("a note that it did not sign"))
            found.append(text)
        return found

    def abort(self, reason: str) -> None:
        self._mesh.stop(reason)
        self._pass_on()

    @property
    def aborted(self) -> str:
        return self._mesh.stopped()

    def _seal(self, rank: int, note: bytes) -> bytes:
        head = struct.pack(">HQ", rank, self._exchanged)
        return hmac.new(self._key, head + note, "sha256").digest()[:MAC_BYTES]

    def _check(self) -> None:
        if self.aborted:
            raise DeviceLost(self.aborted)

    def _lost(self, rank: int, error: Exception) -> None:
        """Raises DeviceLost: with the reason that another rank has sent by now, or else with this one."""
        if not self.aborted:
            time.sleep(POLL_SECONDS)
        self.abort(self._gone(rank, error))
        raise DeviceLost(self.aborted)

    def _gone(self, rank: int, error: Exception) -> str:
        why = str(error) or f"it took nothing for {self._seconds:g} s"
        return f"rank {rank} of {self._size} is lost: {why}"

    def _pass_on(self) -> None:
        """Sends all connected ranks, once, the reason to stop."""
        if not self._abort_sent.acquire(blocking=False):
            return
        self._heard.put(None)
        reason = self.aborted.encode()[:MAX_REASON]
        for wire in self._connections.values():
            with contextlib.suppress(OSError):
                wire.send(ABORT, reason, time.monotonic() + ABORT_SECONDS)

    def _listen_once(self) -> bool:
        """Listens once; returns whether to go on."""
        by_number = {wire.fileno(): (rank, wire) for rank, wire in self._connections.items() if wire.fileno() >= 0}
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(POLL_SECONDS * 1000):
            rank, wire = by_number[number]
            try:
                frame = wire.receive(time.monotonic() + self._seconds, MAX_FRAME, lambda: not self.aborted)
            except OSError as error:
                time.sleep(GRACE_SECONDS)
                self._mesh.stop(self._gone(rank, error))
                break
            if frame.kind == ABORT:
                self._mesh.stop(frame.payload[:MAX_REASON].decode(errors="replace"))
            elif self._rank:
                self._heard.put(bytes(frame.payload))
        if self.aborted:
            self._pass_on()
        return not self.aborted

    def close(self) -> None:
        for wire in self._connections.values():
            wire.close()


def _listen_loop(letters: "weakref.ref[RankMessages]") -> None:
    """Listens as long as the channel exists."""
    while True:
        mine = letters()
        if mine is None or not mine._listen_once():
            return
        del mine
