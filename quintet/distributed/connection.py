"""TCP connection with authenticated ends: both have proven to know the same key, and sign their messages.

Neither end sends the key. Each answers a challenge of the other's (HMAC-SHA256), and a frame's tag counts the frames,
so that none can be left out, repeated or forged. Nothing is encrypted.
"""

import contextlib
import hmac
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAGIC = b"quintet1"
NONCE = TAG = 32  # bytes
_SHORT = 16  # bytes of a frame's tag
_HEAD = struct.Struct(">IB")  # bytes of the payload, kind
GREETING = 10.0  # seconds for the whole of a challenge: a stranger holds nothing for longer
MOST_META = 1 << 20  # bytes of a frame while ranks meet
MOST = 1 << 30  # bytes of a message: prompts as embeddings are large


class AuthenticationFailed(ConnectionError):
    """The other end does not know the key, or is no rank at all."""


class Closed(ConnectionError):
    """The other end has closed the connection, or the network between has ended it."""


class Frame(NamedTuple):
    kind: int
    payload: bytes


def tuned(connection: socket.socket, seconds: float) -> None:
    """Configures a connection: small messages go at once. An end that does not answer any more, to the system either,
    is given up in half of the seconds that ranks wait for each other."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit = max(1, int(seconds / 2))
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit * 1000)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, limit // 3))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, limit // 6))


class Connection:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, sends: bytes, hears: bytes) -> None:
        """`sends`, `hears`: the keys of the two directions. OSError if the other end is gone already."""
        connection.setblocking(False)
        name = connection.getpeername()
        # the other end's address: the system does not know it any more once that has gone
        self.peer = str(name[0]) if isinstance(name, tuple) else "this machine"
        self._connection, self._sends, self._hears = connection, sends, hears
        self._sent = self._heard = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def here(self) -> str:
        """Returns the address of the interface by which the other end is reached."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: int, payload: bytes, until: float, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Sends a frame. Closed or TimeoutError (`until`, of time.monotonic()) if it is not sent whole: then nothing
        more can be."""
        if len(payload) > MOST:
            raise ValueError(f"a message of {len(payload)} bytes; {MOST} at most go to another rank")
        with self._lock:
            tag = _tag(self._sends, self._sent, kind, payload)
            self._sent += 1
            data = memoryview(_HEAD.pack(len(payload), kind) + payload + tag)
            while data:
                data = data[self._some(data) :]
                if data and not goes_on():
                    raise Closed("sending was stopped before the frame was complete")
                if data and time.monotonic() > until:
                    raise TimeoutError

    def _some(self, data: memoryview) -> int:
        try:
            return self._connection.send(data)
        except (BlockingIOError, InterruptedError):
            waited_for(self._connection.fileno(), select.POLLOUT)
            return 0
        except OSError as error:
            raise Closed(error.strerror or "its connection was closed") from None

    def receive(self, until: float, most: int = MOST_META, goes_on: Callable[[], bool] = lambda: True) -> Frame:
        """Waits for the next frame. Stranger if its tag is wrong or it is longer than `most` bytes."""
        length, kind = _HEAD.unpack(self._exactly(_HEAD.size, until, goes_on))
        if length > most:
            raise AuthenticationFailed(f"a message of {length} bytes, where {most} at most are taken")
        payload = self._exactly(length, until, goes_on)
        tag = self._exactly(_SHORT, until, goes_on)
        if not hmac.compare_digest(tag, _tag(self._hears, self._heard, kind, payload)):
            raise AuthenticationFailed("a message that this key did not sign")
        self._heard += 1
        return Frame(kind, payload)

    def _exactly(self, count: int, until: float, goes_on: Callable[[], bool]) -> bytes:
        """Reads in pieces as they come: an announced length reserves no memory."""
        data = bytearray()
        while len(data) < count:
            try:
                some = self._connection.recv(min(count - len(data), 1 << 20))
            except (BlockingIOError, InterruptedError):
                if not goes_on():
                    raise Closed("receiving was stopped before the frame was complete") from None
                if time.monotonic() > until:
                    raise TimeoutError from None
                waited_for(self._connection.fileno(), select.POLLIN)
                continue
            except OSError as error:
                raise Closed(error.strerror or "its connection was closed") from None
            if not some:
                raise Closed("its connection was closed")
            data += some
        return bytes(data)

    @property
    def gone(self) -> bool:
        """Returns whether the other end has closed the connection; what it sent before can still be read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def release(self) -> int:
        """Returns the socket's descriptor, which is the caller's from here on, to close as well."""
        return self._connection.detach()

    def close(self) -> None:
        self._connection.close()


def waited_for(descriptor: int, what: int, seconds: float = 0.1) -> bool:
    """Returns whether it can be read or written (select.POLLIN, POLLOUT), at most so many seconds from now."""
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(seconds * 1000))


def _tag(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
    mac = hmac.new(key, struct.pack(">QBQ", number, kind, len(payload)), "sha256")
    mac.update(payload)
    return mac.digest()[:_SHORT]


def greeted(connection: socket.socket, key: bytes) -> Connection:
    """Authenticates the end that was connected to. Stranger: the end that has connected does not know the key."""
    with _within(connection):
        mine = os.urandom(NONCE)
        connection.sendall(MAGIC + mine)
        said = _read(connection, len(MAGIC) + NONCE + TAG)
        theirs = said[len(MAGIC) : -TAG]
        if not said.startswith(MAGIC) or not hmac.compare_digest(said[-TAG:], _proof(key, b"comes", mine + theirs)):
            raise AuthenticationFailed("it does not know the key")
        connection.sendall(_proof(key, b"is met", mine + theirs))
    return Connection(connection, _proof(key, b"from here", mine + theirs), _proof(key, b"to here", mine + theirs))


def greet(connection: socket.socket, key: bytes) -> Connection:
    """Authenticates the end that connects."""
    with _within(connection):
        said = _read(connection, len(MAGIC) + NONCE)
        if not said.startswith(MAGIC):
            raise AuthenticationFailed("no rank of this version of quintet listens there")
        theirs, mine = said[len(MAGIC) :], os.urandom(NONCE)
        connection.sendall(MAGIC + mine + _proof(key, b"comes", theirs + mine))
        try:
            answer = _read(connection, TAG)
        except Closed:
            raise AuthenticationFailed("it knows another key") from None
        if not hmac.compare_digest(answer, _proof(key, b"is met", theirs + mine)):
            raise AuthenticationFailed("it knows another key")
    return Connection(connection, _proof(key, b"to here", theirs + mine), _proof(key, b"from here", theirs + mine))


def _proof(key: bytes, what: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, what + b"\0" + nonces, "sha256").digest()


@contextlib.contextmanager
def _within(connection: socket.socket) -> Iterator[None]:
    connection.settimeout(GREETING)
    try:
        yield
    except (TimeoutError, ConnectionResetError, BrokenPipeError) as error:
        raise Closed(str(error) or "it did not answer") from None


def _read(connection: socket.socket, count: int) -> bytes:
    data, until = b"", time.monotonic() + GREETING
    while len(data) < count:
        some = connection.recv(count - len(data))
        if not some or time.monotonic() > until:
            raise Closed("its connection was closed")
        data += some
    return data
