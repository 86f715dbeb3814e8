"""Connections with authenticated ends: frames that were changed, recordings, other protocols and keys."""

import os
import socket
import struct
import threading
import time
from typing import Any

import pytest

from quintet.distributed import connection
from quintet.distributed.connection import (
    NONCE,
    TAG,
    AuthenticationFailed,
    Connection,
    ConnectionClosed,
    authenticate_client,
    authenticate_server,
)

KEY, PROTOCOL = b"a key of these", b"quintet tests 1"


def soon() -> float:
    return time.monotonic() + 5


def ends(server_key: bytes = KEY, server_protocol: bytes = PROTOCOL) -> tuple[Any, Any]:
    """The client's and the server's end, or why there is none."""
    one, other = socket.socketpair()
    found = dict[str, Any]()

    def serve() -> None:
        try:
            found["server"] = authenticate_client(other, server_key, server_protocol, soon())
        except OSError as error:
            found["server"] = error
            other.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client: Any = authenticate_server(one, KEY, PROTOCOL, soon())
    except OSError as error:
        client = error
        one.close()
    thread.join()
    return client, found["server"]


def test_frames_of_any_size_arrive_as_sent_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_WRITE_BYTES", 1 << 20)
    client, server = ends()
    for size in (0, 1, 100_000, 2**20 - TAG, 2**20, 5 * 2**20 + 12345):
        payload = os.urandom(size)
        for sender, receiver in ((client, server), (server, client)):
            thread = threading.Thread(target=sender.send, args=(3, payload, soon()))
            thread.start()
            assert receiver.receive(soon(), 1 << 26) == (3, payload)
            thread.join()


def test_both_ends_need_the_same_key_and_protocol() -> None:
    client, server = ends(server_key=b"another key")
    assert isinstance(client, AuthenticationFailed) and "it knows another key" in str(client)
    assert isinstance(server, AuthenticationFailed) and "it does not know the key" in str(server)
    client, server = ends(server_protocol=b"quintet tests 2")
    assert isinstance(client, AuthenticationFailed) and "run the same quintet on both" in str(client)
    assert isinstance(server, ConnectionClosed)


def test_a_server_without_the_key_cannot_answer_with_what_the_client_sent() -> None:
    one, other = socket.socketpair()
    other.sendall(PROTOCOL + b"n" * NONCE)

    def reflect() -> None:
        other.sendall(other.recv(1000)[-TAG:])

    threading.Thread(target=reflect).start()
    with pytest.raises(AuthenticationFailed, match="it knows another key"):
        authenticate_server(one, KEY, PROTOCOL, soon())


def test_a_recording_is_worth_nothing_on_another_connection_or_in_the_other_direction() -> None:
    one, middle = socket.socketpair()
    with pytest.raises(
        ConnectionClosed, match="it did not answer"
    ):  # the server's first words are recorded, and used again
        authenticate_client(middle, KEY, PROTOCOL, time.monotonic() + 0.05)
    one.setblocking(False)
    recorded = one.recv(1000)
    replayed, far = socket.socketpair()
    far.sendall(recorded)
    with pytest.raises(ConnectionClosed, match="it did not answer"):
        authenticate_server(replayed, KEY, PROTOCOL, time.monotonic() + 0.05)
    answer = far.recv(1000)
    one, other = socket.socketpair()
    one.sendall(answer)
    with pytest.raises(AuthenticationFailed, match="it does not know the key"):
        authenticate_client(other, KEY, PROTOCOL, soon())
    client, server = ends()
    client.send(1, b"to the server", soon())
    frame = os.read(server.fileno(), 1000)
    os.write(server.fileno(), frame)  # back to its sender
    with pytest.raises(AuthenticationFailed, match="HMAC mismatch"):
        client.receive(soon())
    client, server = ends()
    client.send(1, b"once", soon())
    frame = os.read(server.fileno(), 1000)
    os.write(client.fileno(), frame * 2)
    assert server.receive(soon()) == (1, b"once")
    with pytest.raises(AuthenticationFailed, match="HMAC mismatch"):
        server.receive(soon())


def test_a_stranger_is_given_up_in_time_and_costs_a_few_bytes() -> None:
    for words in (b"", b"GET / HTTP/1.1\r\n", os.urandom(len(PROTOCOL) + NONCE + TAG)):
        one, other = socket.socketpair()
        one.sendall(words)
        began = time.monotonic()
        with pytest.raises((AuthenticationFailed, ConnectionClosed)):
            authenticate_client(other, KEY, PROTOCOL, began + 0.1)
        assert time.monotonic() - began < 2
        assert len(one.recv(1000)) <= len(PROTOCOL) + NONCE + TAG


def test_a_connection_knows_its_peer_after_that_has_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    made = Connection(one, b"a" * 32, b"b" * 32)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()  # at once: it is reset
    with pytest.raises(ConnectionClosed):
        made.receive(time.monotonic() + 30)
    with pytest.raises(OSError):
        one.getpeername()
    assert made.peer == "127.0.0.1"


def test_a_frame_that_was_changed_or_is_too_long_is_refused() -> None:
    one, other = socket.socketpair()
    sends, hears = Connection(one, b"a" * 32, b"b" * 32), Connection(other, b"b" * 32, b"a" * 32)
    until = time.monotonic() + 5
    sends.send(1, b"hello", until)
    assert hears.receive(until) == (1, b"hello")
    sends.send(1, b"x" * 100, until)
    with pytest.raises(AuthenticationFailed, match="100 bytes, where 50 at most"):
        hears.receive(until, 50)
    for changed in (0, 5, -1):  # the length is believed only as far as the tag says so
        one, other = socket.socketpair()
        sends, hears = Connection(one, b"a" * 32, b"b" * 32), Connection(other, b"b" * 32, b"a" * 32)
        sends.send(1, b"", until)
        data = bytearray(other.recv(100))
        data[changed if changed < len(data) else -1] ^= 1
        one.sendall(bytes(data))
        with pytest.raises((AuthenticationFailed, TimeoutError)):
            hears.receive(time.monotonic() + 0.2)
