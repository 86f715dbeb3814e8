"""Events of the prefix cache as a subscriber reads them: by vLLM's schema, written down here once more."""

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from quintet.config import EngineConfig, KVEventsConfig
from quintet.engine import startup
from quintet.engine.kv_cache import events as kv_events
from quintet.engine.kv_cache.events import EventBatch, KVEventLog, Publisher, external_hash, group_index
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.lora.request import LoRAReference
from tests.engine.kv_transfer.test_manager import Connected, Odd, beginnings
from tests.engine.test_overlap import Served, traffic
from tests.helpers.platforms.null_engine import VOCAB, complete, greedy, null_client

ON = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class OldStored(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[int]


class OldCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]


class Mirror:
    """What a subscriber believes to be cached."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, int], Stored] = {}
        self.parents: dict[int, int | None] = {}

    def take(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Cleared | OldCleared):
                self.pages.clear()
            elif isinstance(event, Removed | OldRemoved):
                for each in event.block_hashes:
                    del self.pages[each, getattr(event, "group_idx", None) or 0]
            else:
                assert len(event.token_ids) == event.block_size * len(event.block_hashes) and event.medium == "GPU"
                for each in event.block_hashes:
                    assert (each, getattr(event, "group_idx", None) or 0) not in self.pages, "it is there already"
                    self.pages[each, getattr(event, "group_idx", None) or 0] = event


class Kept:
    """In the place of a publisher."""

    def __init__(self) -> None:
        self.mirror = Mirror()

    def send(self, batch: EventBatch) -> None:
        self.mirror.take(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch).events)

    def close(self) -> None:
        pass


TOLD = {"enable_kv_cache_events": True, "publisher": "zmq"}


def logging_to(kept: Kept) -> dict[str, Any]:
    """What makes an engine's log, in the place of the function of startup."""
    return {"make_event_log": lambda *_: KVEventLog(kept, 4, "map")}  # type: ignore[arg-type]


def cached(pool: PagePool) -> set[tuple[int, int]]:
    return {(external_hash(digest), int.from_bytes(digest[16:], "little")) for digest in pool._page_of}


@pytest.mark.parametrize("settings", [{}, {"num_pages": 17, "max_num_batched_tokens": 7}], ids=str)
def test_who_listens_knows_what_is_cached(settings: dict[str, Any]) -> None:
    """After every traffic; with preemptions, failures, and steps that run ahead."""
    kept = Kept()
    served = Served(replaced=logging_to(kept), kv_events_config=TOLD, **settings)
    pool = served.engine.scheduler.pool
    for seed in range(4):
        served.run(*traffic(seed))
        assert set(kept.mirror.pages) == cached(pool) and kept.mirror.pages
    served.work.fails.append(("run", 0, RuntimeError("on fire")))
    served.run(*traffic(5))
    served.engine.step()
    assert set(kept.mirror.pages) == cached(pool)
    served.engine.reset_prefix_cache()
    assert not kept.mirror.pages and not cached(pool)


def test_events_name_the_adapter_that_computed_a_page() -> None:
    sent: list[EventBatch] = []
    kept = Kept()
    kept.send = sent.append  # type: ignore[method-assign]
    log = KVEventLog(kept, 2, "map")  # type: ignore[arg-type]
    log.log_stored(b"a" * 20, None, [1, 2], LoRAReference("sql", "path", b"digest", 7))
    log.log_stored(b"b" * 20, None, [3, 4])
    log.publish()
    assert [(each.lora_id, each.lora_name) for each in sent[0].events] == [(7, "sql"), (None, None)]


def test_pages_that_came_from_elsewhere_are_told_of() -> None:
    kept = Kept()
    ours = Connected(Odd(1), replaced=logging_to(kept), kv_events_config=TOLD, num_pages=17)
    pool = ours.engine.scheduler.pool
    for _ in range(2):
        ours.run(*beginnings(6))
        assert set(kept.mirror.pages) == cached(pool)
    assert ours.engine.stats().kv_connector.pages_loaded > 0


def test_events_of_a_prompt_say_its_tokens_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    class Listed(Kept):
        def send(self, batch: EventBatch) -> None:
            batches.append(msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch))

    monkeypatch.setattr(startup, "make_event_log", logging_to(Listed())["make_event_log"])
    client = null_client(page_size=4, kv_events_config=TOLD)
    prompt = [(7 * i) % VOCAB for i in range(11)]
    before = time.time()
    complete(client, prompt, greedy(max_tokens=2))
    (first,) = batches[0].events
    assert isinstance(first, Stored) and before <= batches[0].ts <= time.time()
    assert (first.token_ids, first.parent_block_hash, first.block_size) == (prompt[:8], None, 4)
    assert len(first.block_hashes) == 2
    (then,) = batches[1].events
    assert isinstance(then, Stored) and then.parent_block_hash == first.block_hashes[-1] and len(then.token_ids) == 4


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def subscribed(context: zmq.Context, endpoint: str, topic: str = "") -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
    socket.connect(endpoint)
    return socket


def replayed(context: zmq.Context, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    socket.connect(endpoint)
    socket.send(first.to_bytes(8, "big"))
    router: list[tuple[int, bytes]] = []
    frames = socket.recv_multipart()
    assert len(frames) == 2
    seq = int.from_bytes(frames[0], "big", signed=True)
    if seq >= 0:
        router.append((seq, frames[1]))
    return router


def publisher(client: Any) -> Publisher:
    found: Publisher = client.engine.scheduler.pool.event_log._publisher
    return found


@pytest.mark.parametrize(("layout", "batch"), [("map", Batch), ("array", OldBatch)])
def test_a_subscriber_gets_all_over_the_wire_and_asks_for_what_it_missed(
    layout: str, batch: type[Any], context: zmq.Context
) -> None:
    client = null_client(
        page_size=4, num_pages=20, max_model_len=32, kv_events_config={**ON, "layout": layout, "topic": "kv"}
    )
    told, prompts = publisher(client), random.Random(3)
    complete(client, [prompts.randrange(VOCAB) for _ in range(16)], greedy(max_tokens=4))  # nobody listens
    socket = subscribed(context, told.endpoint, "kv")
    seen: dict[int, bytes] = {}
    while not seen:  # a subscription takes a moment
        complete(client, [prompts.randrange(VOCAB) for _ in range(16)], greedy(max_tokens=4))
        if socket.poll(200):
            topic, seq, payload = socket.recv_multipart()
            assert topic == b"kv"
            seen[int.from_bytes(seq, "big")] = payload
    complete(client, [prompts.randrange(VOCAB) for _ in range(16)], greedy(max_tokens=4))
    last = told._next - 1
    while last not in seen:
        _, seq, payload = socket.recv_multipart()
        seen[int.from_bytes(seq, "big")] = payload
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, 20_000)
    asker.connect(told.replay_endpoint)
    asker.send_multipart((b"nonsense",))  # is passed over
    asker.send_multipart((b"", (0).to_bytes(8, "big")))
    again: dict[int, bytes] = {}
    while True:
        empty, seq, payload = asker.recv_multipart()
        assert empty == b""
        if int.from_bytes(seq, "big", signed=True) == -1:
            break
        again[int.from_bytes(seq, "big")] = payload
    assert list(again) == list(range(last + 1)) and seen.items() <= again.items()
    mirror = Mirror()
    for payload in again.values():
        mirror.take(msgspec.msgpack.decode(payload, type=batch).events)
    assert set(mirror.pages) == cached(client.engine.scheduler.pool)
    client.close()


def test_what_is_kept_for_a_replay_is_bounded(context: zmq.Context) -> None:
    config = EngineConfig(kv_events_config={**ON, "buffer_steps": 3}).kv_events_config  # type: ignore[arg-type]
    told = Publisher(config)
    socket = subscribed(context, told.endpoint)
    while not socket.poll(50):
        told.send(EventBatch(0.0, []))
    for _ in range(10):
        told.send(EventBatch(0.0, []))
    while int.from_bytes(socket.recv_multipart()[1], "big") < told._next - 1:
        pass
    assert replayed(context, told.replay_endpoint, 0)[0][0] == told._next - 3
    assert replayed(context, told.replay_endpoint, 10**6) == []
    told.close()


def test_an_engine_does_not_wait_for_its_publisher(caplog: pytest.LogCaptureFixture) -> None:
    told = Publisher(EngineConfig(kv_events_config={**ON, "max_queue_size": 2}).kv_events_config)  # type: ignore[arg-type]
    began = time.monotonic()
    batch = EventBatch(0.0, ["x" * 10_000])
    while not told._left_out and time.monotonic() - began < 20:
        for _ in range(1000):
            told.send(batch)
    assert told._left_out > 0 and "events are left out" in caplog.text
    told.close()


def test_nobody_is_told_where_nothing_was_enabled() -> None:
    for config in ({}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert null_client(kv_events_config=config).engine.scheduler.pool.event_log is None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"endpoint": "5557"}, "endpoint must be an address such as tcp://127.0.0.1:5557"),
        ({"publisher": "kafka"}, "publisher must be one of zmq, null"),
        ({"buffer_steps": 0}, "buffer_steps must be at least 1"),
        ({"topics": "x"}, "entry of kv_events_config.*did you mean 'topic'"),
        ({"layout": "json"}, "layout must be one of map, array"),
    ],
)
def test_what_cannot_be_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True, **entries})  # type: ignore[arg-type]


def test_an_address_that_is_taken_is_refused_when_the_engine_starts() -> None:
    client = null_client(kv_events_config=ON)
    taken = publisher(client).endpoint
    with pytest.raises(ValueError, match="kv_events_config.endpoint: .* cannot be used .*; give another"):
        null_client(kv_events_config={**ON, "endpoint": taken})
    client.close()


@pytest.mark.parametrize(
    ("endpoint", "engine", "own"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("ipc:///run/kv", 1, "ipc:///run/kv_dp1"),
    ],
)
def test_engines_of_several_have_addresses_of_their_own(endpoint: str, engine: int, own: str) -> None:
    assert kv_events._engine_endpoint(endpoint, engine) == own


def test_each_of_several_engines_tells_at_its_own_address(context: zmq.Context) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port - 1}")
    journal = kv_events.make_event_log(config, 16, 1)
    listener = context.socket(zmq.SUB)
    listener.subscribe(b"")
    listener.connect(f"tcp://127.0.0.1:{port}")
    try:
        while not listener.poll(20):  # until the subscription has arrived
            journal.log_cleared()
            journal.publish()
        assert msgspec.msgpack.decode(listener.recv_multipart()[2])[1] == [{"type": "AllBlocksCleared"}]
    finally:
        journal.close()


def test_a_digest_has_the_hash_of_the_chain_and_the_group_behind_it() -> None:
    chain = bytes(range(16))
    assert external_hash(chain) == external_hash(chain + b"\x02\x01") == 0x08090A0B0C0D0E0F
    assert [group_index(chain + group) for group in (b"", b"\x00", b"\x02\x01")] == [None, None, 0x0102]
