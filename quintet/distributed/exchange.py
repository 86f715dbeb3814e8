"""Exchange of notes between ranks, over a connection between each two of them: a compiled mesh's part, in Python.

For ranks with another path for tensors: only notes go through here.
"""

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import NoReturn

from quintet.distributed.messages import GRACE_SECONDS

MAX_MESSAGE = 2048  # bytes
POLL_SECONDS = 0.1  # seconds between two looks at whether stop() was called
_HEAD = struct.Struct(">H")  # bytes of the note


class RankLost(RuntimeError):
    """A rank is gone, or the exchange was stopped."""


class MessageExchange:
    """This rank's ends of all connections."""

    def __init__(self, sockets: Sequence[int], rank: int, seconds: float) -> None:
        """`sockets`: descriptors by rank, from here on this object's, -1 in the own place; `seconds`: a rank that is
        silent for longer is lost."""
        self._rank, self._size, self._seconds, self._why = rank, len(sockets), seconds, ""
        self._sockets = {other: socket.socket(fileno=each) for other, each in enumerate(sockets) if each >= 0}
        for each in self._sockets.values():
            each.setblocking(False)

    def exchange(self, note: bytes) -> list[bytes]:
        """Returns all ranks' notes, in rank order. RankLost: one did not come."""
        assert len(note) <= MAX_MESSAGE, "a note is short"
        until = time.monotonic() + self._seconds
        for other, each in self._sockets.items():
            self._send(other, each, _HEAD.pack(len(note)) + note, until)
        return [self._receive(other, until) if other in self._sockets else note for other in range(self._size)]

    def stop(self, why: str) -> None:
        """Stops the exchange; the first reason holds. From any thread."""
        self._why = self._why or why

    def stopped(self) -> str:
        return self._why

    def wait_until_gone(self, seconds: float) -> None:
        """Waits until the processes of all others have ended, at most so long; what they still send is discarded."""
        until, left = time.monotonic() + seconds, list(self._sockets.values())
        while left and time.monotonic() < until:
            select.select(left, [], [], POLL_SECONDS)
            left = [each for each in left if not _is_closed(each)]

    def _send(self, other: int, connection: socket.socket, data: bytes, until: float) -> None:
        while data:
            try:
                data = data[connection.send(data) :]
            except (BlockingIOError, InterruptedError):
                self._wait(other, select.POLLOUT, until)
            except OSError as error:
                self._lost(other, error.strerror or "its connection was closed")

    def _receive(self, other: int, until: float) -> bytes:
        (length,) = _HEAD.unpack(self._exactly(other, _HEAD.size, until))
        if length > MAX_MESSAGE:
            self._lost(other, f"it brought a note of {length} bytes, where {MAX_MESSAGE} at most are taken")
        return self._exactly(other, length, until)

    def _exactly(self, other: int, count: int, until: float) -> bytes:
        data = b""
        while len(data) < count:
            try:
                some = self._sockets[other].recv(count - len(data))
            except (BlockingIOError, InterruptedError):
                self._wait(other, select.POLLIN, until)
                continue
            except OSError as error:
                self._lost(other, error.strerror or "its connection was closed")
            if not some:
                self._lost(other, "its connection was closed")
            data += some
        return data

    def _wait(self, other: int, what: int, until: float) -> None:
        """Waits a moment, for the other to read or write."""
        if self._why:
            raise RankLost(self._why)
        if time.monotonic() > until:
            self.stop(f"rank {other} of {self._size} did not come within {self._seconds:g} s")
            raise RankLost(self._why)
        poll = select.poll()
        poll.register(self._sockets[other], what)
        poll.poll(POLL_SECONDS * 1000)

    def _lost(self, other: int, how: str) -> NoReturn:
        """Raises RankLost: with the reason that another rank sends within a moment, or else with this one."""
        until = time.monotonic() + GRACE_SECONDS
        while not self._why and time.monotonic() < until:
            time.sleep(GRACE_SECONDS / 10)
        self.stop(f"rank {other} of {self._size} is lost: {how}")
        raise RankLost(self._why)


def _is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError, InterruptedError):
        try:
            return not connection.recv(MAX_MESSAGE)
        except ConnectionError:
            return True
    return False
