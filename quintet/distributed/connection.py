"""TCP connection with authenticated ends: both have proven to know the same key, and sign their frames.

Neither end sends the key: each answers a challenge of the other's (HMAC-SHA256). Proofs and the keys of the two
directions depend on the protocol's name and on both challenges, so that a recording is worth nothing on another
connection; a frame's tag counts the frames, so that none can be left out, repeated or forged. Nothing is encrypted.
"""

import hmac
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

NONCE = TAG = 32  # bytes
_HEAD = struct.Struct(">IB")  # bytes of the payload, kind
_REFUSED_TAG = bytes(TAG)  # in the place of a proof
FIRST_BYTE_SECONDS = 1.0  # in which an end that was challenged begins to answer
_NUMBER = struct.Struct(">Q")  # of a frame, which its tag covers
MAX_META = 1 << 20  # bytes of a frame while ranks meet
MAX_FRAME = 1 << 30  # bytes of a message: prompts as embeddings are large
MAX_WRITE_BYTES = 1 << 26  # bytes of memory that an announced length reserves; more as they come


class AuthenticationFailed(ConnectionError):
    """The other end does not know the key, or does not speak the protocol."""


class ConnectionClosed(ConnectionError):
    """The other end has closed the connection, or the network between has ended it."""


class Frame(NamedTuple):
    kind: int
    payload: bytes | bytearray


def _always_true() -> bool:
    return True


def configure_socket(connection: socket.socket, seconds: float) -> None:
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

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """OSError if the other end is gone already."""
        connection.setblocking(False)
        name = connection.getpeername()
        # the other end's address: the system does not know it any more once that has gone
        self.peer = str(name[0]) if isinstance(name, tuple) else "this machine"
        self._connection, self._send_key, self._receive_key = connection, send_key, receive_key
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def local_address(self) -> str:
        """Returns the address of the interface by which the other end is reached."""
        return str(self._connection.getsockname()[0])

    def send(self, kind: int, payload: bytes, until: float, goes_on: Callable[[], bool] = _always_true) -> None:
        """Sends a frame. Closed or TimeoutError (`until`, of time.monotonic()) if it is not sent whole: then nothing
        more can be."""
        if len(payload) > MAX_FRAME:
            raise ValueError(f"a message of {len(payload)} bytes; {MAX_FRAME} at most are sent")
        with self._lock:
            head = _HEAD.pack(len(payload), kind)
            tag = _tag(self._send_key, self._sent, head, payload)
            self._sent += 1
            _send(self._connection, [head, payload, tag], until, goes_on)

    def receive(self, until: float, most: int = MAX_META, goes_on: Callable[[], bool] = _always_true) -> Frame:
        """Waits for the next frame. AuthenticationFailed if its tag is wrong or it is longer than `most` bytes."""
        head = bytes(_receive(self._connection, _HEAD.size, until, goes_on))
        length, kind = _HEAD.unpack(head)
        if length > most:
            raise AuthenticationFailed(f"a message of {length} bytes, where {most} at most are taken")
        payload = _receive(self._connection, length + TAG, until, goes_on)
        tag = payload[length:]
        del payload[length:]
        if not hmac.compare_digest(tag, _tag(self._receive_key, self._received, head, payload)):
            raise AuthenticationFailed("frame authentication failed (HMAC mismatch)")
        self._received += 1
        return Frame(kind, payload)

    @property
    def is_closed(self) -> bool:
        """Returns whether the other end has closed the connection; what it sent before can still be read."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def detach(self) -> int:
        """Returns the socket's descriptor, which is the caller's from here on, to close as well."""
        return self._connection.detach()

    def close(self) -> None:
        self._connection.close()


def wait_ready(descriptor: int, what: int, seconds: float = 0.1) -> bool:
    """Returns whether it can be read or written (select.POLLIN, POLLOUT), at most so many seconds from now."""
    poll = select.poll()
    poll.register(descriptor, what)
    return bool(poll.poll(seconds * 1000))


def _wait(connection: socket.socket, what: int, until: float, goes_on: Callable[[], bool]) -> None:
    """Waits a moment, until the connection can be read or written. Closed: this end stops; TimeoutError."""
    if not goes_on():
        raise ConnectionClosed("the connection was stopped before the frame was complete")
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    wait_ready(connection.fileno(), what, min(left, 0.1))


def _send(
    connection: socket.socket, parts: list[bytes], until: float, goes_on: Callable[[], bool] = _always_true
) -> None:
    """Sends all parts, which are not copied."""
    left = [memoryview(part) for part in parts if part]
    while left:
        try:
            sent = connection.sendmsg(left)
        except (BlockingIOError, InterruptedError):
            _wait(connection, select.POLLOUT, until, goes_on)
            continue
        except OSError as error:
            raise ConnectionClosed(error.strerror or "its connection was closed") from None
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def _receive(
    connection: socket.socket, count: int, until: float, goes_on: Callable[[], bool] = _always_true
) -> bytearray:
    data, filled = bytearray(min(count, MAX_WRITE_BYTES)), 0
    while filled < count:
        if filled == len(data):
            data += bytes(min(count - filled, filled))
        try:
            with memoryview(data) as view, view[filled:] as rest:
                some = connection.recv_into(rest)
        except (BlockingIOError, InterruptedError):
            _wait(connection, select.POLLIN, until, goes_on)
            continue
        except OSError as error:
            raise ConnectionClosed(error.strerror or "its connection was closed") from None
        if not some:
            raise ConnectionClosed("its connection was closed")
        filled += some
    return data


def _tag(key: bytes, number: int, head: bytes, payload: bytes | bytearray) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number) + head, "sha256")
    mac.update(payload)
    return mac.digest()


class _Secrets(NamedTuple):
    """Proofs of both ends and keys of both directions of one connection."""

    client: bytes
    server: bytes
    to_client: bytes
    to_server: bytes


def _secrets(key: bytes, protocol: bytes, nonces: bytes) -> _Secrets:
    return _Secrets(
        *(hmac.digest(key, b"\0".join((protocol, what.encode(), nonces)), "sha256") for what in _Secrets._fields)
    )


def authenticate_client(connection: socket.socket, key: bytes, protocol: bytes, until: float) -> Connection:
    """Authenticates the end that has connected. AuthenticationFailed: it does not know the key; Closed: it is gone, or
    did not answer."""
    connection.setblocking(False)
    nonce = os.urandom(NONCE)
    try:
        _send(connection, [protocol, nonce], until)
        first_byte = min(until, time.monotonic() + FIRST_BYTE_SECONDS)
        while not wait_ready(connection.fileno(), select.POLLIN):
            if time.monotonic() > first_byte:
                raise TimeoutError
        answer = bytes(_receive(connection, len(protocol) + NONCE + TAG, until))
        secrets = _secrets(key, protocol, nonce + answer[-NONCE - TAG : -TAG])
        if not answer.startswith(protocol) or not hmac.compare_digest(answer[-TAG:], secrets.client):
            _send(connection, [_REFUSED_TAG], until)
            raise AuthenticationFailed("it does not know the key")
        _send(connection, [secrets.server], until)
        return Connection(connection, secrets.to_client, secrets.to_server)
    except TimeoutError:
        raise ConnectionClosed("it did not answer") from None


def authenticate_server(connection: socket.socket, key: bytes, protocol: bytes, until: float) -> Connection:
    """Authenticates the end that was connected to. AuthenticationFailed: it speaks another protocol, or does not know
    the key; Closed: it is gone, or did not answer."""
    connection.setblocking(False)
    nonce = os.urandom(NONCE)
    try:
        hello = bytes(_receive(connection, len(protocol) + NONCE, until))
        if not hello.startswith(protocol):
            raise AuthenticationFailed(f"it does not speak {protocol.decode()!r}; run the same quintet on both")
        secrets = _secrets(key, protocol, hello[-NONCE:] + nonce)
        _send(connection, [protocol, nonce, secrets.client], until)
        if not hmac.compare_digest(_receive(connection, TAG, until), secrets.server):
            raise AuthenticationFailed("it knows another key")
        return Connection(connection, secrets.to_server, secrets.to_client)
    except TimeoutError:
        raise ConnectionClosed("it did not answer") from None
