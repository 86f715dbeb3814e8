"""Strangers without the key delay neither ranks nor engines that fetch pages, nor fill the log (attack A8)."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quintet.distributed import connection
from quintet.distributed.connection import ConnectionClosed, authenticate_client
from quintet.distributed.handshakes import LOG_LINES
from quintet.distributed.rendezvous import JoinedRanks, RendezvousTerms, join, listen_on
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.sockets import connect
from quintet.engine.kv_transfer_params import LeasePeer
from quintet.interface.types import RankInfo
from tests.engine.kv_transfer.test_manager import WORDS
from tests.engine.kv_transfer.test_transfers import FACTS, KEY

WITHIN = 5.0  # seconds; alone it takes some milliseconds
SENT = {"silent": b"", "one_byte": b"q", "a_wrong_proof": b"\xff" * 4096}


@contextlib.contextmanager
def strangers(port: int, sends: bytes, at_once: int) -> Iterator[None]:
    """As many connections as are let in, kept up: a new one for each that is closed."""
    ended = threading.Event()

    def stay() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as stranger:
                stranger.sendall(sends)
                stranger.settimeout(0.1)
                while not ended.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not stranger.recv(100):
                            break
            ended.wait(0.1)

    threads = [threading.Thread(target=stay, daemon=True) for _ in range(at_once)]
    for each in threads:
        each.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        ended.set()
        for each in threads:
            each.join(3)


@pytest.mark.parametrize("sends", SENT)
def test_ranks_meet_beside_strangers(sends: str, caplog: pytest.LogCaptureFixture) -> None:
    listener = listen_on("127.0.0.1", 0)
    port = listener.getsockname()[1]
    met: dict[int, JoinedRanks] = {}

    def come(rank: int, endpoint: str) -> None:
        met[rank] = join(RankInfo(rank, 2, endpoint), KEY, {}, RendezvousTerms(10.0, 30.0))

    zero = threading.Thread(target=come, args=(0, f"tcp://127.0.0.1:{port}?listener={listener.detach()}"), daemon=True)
    with caplog.at_level(logging.WARNING):
        zero.start()
        with strangers(port, SENT[sends], 40):
            start = time.monotonic()
            one = threading.Thread(target=come, args=(1, f"tcp://127.0.0.1:{port}"), daemon=True)
            one.start()
            one.join(20)
            zero.join(5)
            assert sorted(met) == [0, 1] and time.monotonic() - start < WITHIN
    assert len(caplog.records) <= LOG_LINES + 1


@pytest.mark.parametrize("sends", SENT)
def test_engines_fetch_pages_beside_strangers(sends: str, caplog: pytest.LogCaptureFixture) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listening.getsockname()[1]
    server = PageServer(SendBuffer(2**20, WORDS, 60.0), lambda: FACTS, KEY, 5.0)
    with caplog.at_level(logging.WARNING):
        server.listen(listening)
        with strangers(port, SENT[sends], 80):
            for _ in range(10):
                start = time.monotonic()
                channel = connect(LeasePeer("127.0.0.1", port, "x"), 5.0, 4 * WORDS, True)
                channel.connect_producer(KEY, FACTS)
                channel.close()
                assert time.monotonic() - start < WITHIN
        server.close()
    assert len(caplog.records) <= LOG_LINES + 1


def _ends_within(seconds: float, do: Callable[[], Any]) -> None:
    start = time.monotonic()
    with pytest.raises(ConnectionClosed, match="it did not answer"):
        do()
    assert time.monotonic() - start < seconds


def test_a_peer_that_sends_nothing_is_left_after_a_second() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _ends_within(2.0, lambda: authenticate_client(ours, KEY, b"quintet", time.monotonic() + 10.0))
    assert connection.FIRST_BYTE_SECONDS == 1.0
