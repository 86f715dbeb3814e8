"""Replays of KV events are bounded for a peer that asks often and does not read (attack A10)."""

import resource
import time
from collections.abc import Iterator

import pytest
import zmq

from quintet.config import EngineConfig
from quintet.engine.kv_cache import events
from quintet.engine.kv_cache.events import END, EventBatch, Publisher
from tests.engine.kv_cache.test_events import ON, subscribed

KEPT = 2_000  # batches
FIRST = (0).to_bytes(8, "big")


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def publisher(context: zmq.Context) -> Iterator[Publisher]:
    config = EngineConfig(kv_events_config={**ON, "buffer_steps": KEPT}).kv_events_config  # type: ignore[arg-type]
    made = Publisher(config)
    reader = subscribed(context, made.endpoint)
    while not reader.poll(50):
        made.send(EventBatch(0.0, []))
    while made._next < KEPT:
        made.send(EventBatch(0.0, ["x" * 1000]))
        time.sleep(0)
    while int.from_bytes(reader.recv_multipart()[1], "big") < made._next - 1:
        pass
    yield made
    made.close()


def asker(context: zmq.Context, publisher: Publisher) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(publisher.replay_endpoint)
    return socket


def replay(socket: zmq.Socket) -> list[int]:
    """Numbers of the batches of one replay."""
    found = []
    while True:
        _, seq, _ = socket.recv_multipart()
        if seq == END:
            return found
        found.append(int.from_bytes(seq, "big"))


def megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def test_a_peer_that_asks_often_and_reads_nothing_gets_one_replay(context: zmq.Context, publisher: Publisher) -> None:
    before = megabytes()
    silent = [asker(context, publisher) for _ in range(3)]
    for each in silent:
        each.rcvhwm = 1
        for _ in range(500):
            each.send_multipart((b"", FIRST))
    time.sleep(1.0)
    assert megabytes() - before < 100, "1,500 replays of 2,000 batches of 1,000 bytes are 3 GB"
    other = asker(context, publisher)
    other.send_multipart((b"", FIRST))
    start = time.monotonic()
    assert replay(other) == list(range(publisher._next)) and time.monotonic() - start < 5.0
    publisher.send(EventBatch(1.0, []))  # and events still go out


def test_a_slow_reader_gets_all_once_and_in_order(context: zmq.Context, publisher: Publisher) -> None:
    slow = asker(context, publisher)
    slow.send_multipart((b"", (5).to_bytes(8, "big")))
    time.sleep(0.5)
    assert replay(slow) == list(range(5, publisher._next))
    slow.send_multipart((b"", (7).to_bytes(8, "big")))
    assert replay(slow) == list(range(7, publisher._next)), "a replay that has ended is followed by another"


def test_peers_beyond_the_limit_are_left_out(
    context: zmq.Context, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_REPLAYS", 0)
    left_out = asker(context, publisher)
    left_out.send_multipart((b"", FIRST))
    assert not left_out.poll(500)
