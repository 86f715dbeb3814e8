"""Pages that a library fetches out of the giver's memory: whatever it does, what is said is what one engine says."""

import contextlib
import dataclasses
import functools
import gc
import mmap
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest

from quintet.config import KVTransferConfig
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p import rdma as moved_module
from quintet.engine.kv_transfer.p2p.consumer import PageOrigin, PartialPages, ProducerConnection
from quintet.engine.kv_transfer.p2p.mooncake import MooncakeEngine
from quintet.engine.kv_transfer.p2p.nixl import NixlEngine
from quintet.engine.kv_transfer.p2p.protocol import PeerChannel, ProtocolError, RegionAddress
from quintet.engine.kv_transfer.p2p.rdma import (
    MAX_BUFFERS,
    ExposedRegion,
    ReceiveBufferPool,
    ReceiveBuffers,
    RemoteReads,
)
from quintet.engine.kv_transfer.p2p.remote_memory import MappedRegion, RemoteRegion, send_memory
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.transports import Transport, transport_of
from quintet.engine.kv_transfer_params import LeasePeer
from tests.engine.kv_transfer.test_manager import WORDS, beginnings
from tests.engine.kv_transfer.test_transfers import FACTS, KEY, Two, _until
from tests.engine.test_overlap import ENGINES, Served, traffic
from tests.helpers.servers.mover import Copying

PATIENCE = 0.1  # seconds


def moved(two: Two, giving: Any, taking: Any, patience: float = PATIENCE) -> ReceiveBuffers:
    """From now on pages are fetched by these, which may be one."""
    two.giver.transport, two.giver.share_memory = "a test", ExposedRegion(giving, two.loans.rows)
    stagings = ReceiveBufferPool(taking)
    opening = functools.partial(RemoteReads, mover=taking, stagings=stagings, patience=patience)
    two.taker._route = two.taker._route._replace(open_region=opening, transport="a test")
    return stagings.for_width(WORDS)


@pytest.mark.parametrize("kind", ["whole", "late", "torn", "silent", "cut", "strange"])
def test_random_traffic_says_what_one_engine_says(kind: str) -> None:
    two, mover = Two(**ENGINES["few pages, chunks"]), Copying(kind)
    theirs = Served(False, **ENGINES["few pages, chunks"])
    moved(two, mover, mover)
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks), f"traffic {seed}"
    assert mover.begun > 0 and two.counts.pages_loaded > 0
    assert (two.taker.counts()["failed"] > 0) == (kind not in ("whole", "late"))
    _until(lambda: not mover.met)
    two.close()


@pytest.mark.parametrize("kind", ["whole", "cut"])
def test_a_bad_connection_beside_a_library_costs_computation_alone(kind: str) -> None:
    two, mover = Two(kind, 3), Copying()
    moved(two, mover, mover)
    asks = beginnings(6)
    assert two.run(*asks) == Served(False).run(*asks)
    assert (two.counts.pages_failed > 0) == (kind == "cut")
    two.close()


def test_a_request_may_end_where_its_pages_do_not_come() -> None:
    two, mover = Two(fails=True), Copying("silent")
    mover.odd = lambda: True  # type: ignore[method-assign]
    moved(two, mover, mover)
    ask = beginnings(1)[0]
    got = two.run(ask)["0"]
    assert got.reason == "error" and "here:1: a transfer did not end in time" in (got.error or "")
    two.close()


def test_memory_that_is_written_to_still_is_not_used_again() -> None:
    mover = Copying("silent")
    mover.odd = lambda: True  # type: ignore[method-assign]
    staging, given = ReceiveBuffers(mover, WORDS), []
    for _ in range(MAX_BUFFERS):
        rows = staging.acquire()
        assert all(rows is not each for each in given)
        given.append(rows)
        moving = mover.start_read("peer", [0], rows[:1])
        moving._held = 10**6
        staging.release(rows, moving)
    with pytest.raises(ProtocolError, match="were given up, and have not ended"):
        staging.acquire()
    moving._held = 0
    assert staging.acquire() is given[-1], "the last has ended"


def test_the_other_side_must_be_of_the_same_connector() -> None:
    two, mover = Two(), Copying()
    moved(two, mover, mover)
    for way, why in (("", "pages are given by a test, and wanted by TCP"), ("x", "given by a test, and wanted by x")):
        channel = two.net.connect(LeasePeer("here", 1, "loan"))
        with pytest.raises(ProtocolError, match=why):
            channel.connect_producer(KEY, FACTS, way)
    two.close()


def shared(channel: PeerChannel, loans: SendBuffer) -> None:
    send_memory(channel, loans.descriptor)


@contextlib.contextmanager
def claimed(kind: str) -> Iterator[tuple[Two, SendBuffer, PeerChannel, RemoteRegion]]:
    """A loan of one page, and a connection to who gives it; its memory is mapped or fetched."""
    two, loans, mover = Two(), SendBuffer(4 * WORDS, WORDS, 60.0, shared=kind == "mapped"), Copying()
    two.giver._loans, two.giver.transport = loans, "a test"
    two.giver.share_memory = (
        functools.partial(shared, loans=loans) if kind == "mapped" else ExposedRegion(mover, loans.rows)
    )
    ours, theirs = socket.socketpair()  # descriptors do not pass by way of somebody in the middle
    threading.Thread(target=two.giver.serve, args=(theirs, "a test"), daemon=True).start()
    channel = PeerChannel(ours, 5.0, 0)
    channel.connect_producer(KEY, FACTS, "a test")
    far: RemoteRegion = (
        MappedRegion(channel, WORDS)
        if kind == "mapped"
        else RemoteReads(channel, WORDS, mover, ReceiveBufferPool(mover), 1.0)
    )
    assert loans.reserve("loan", [b"k"])
    loans.fill("loan", [b"k"], np.full((1, WORDS), 7, np.int32))
    yield two, loans, channel, far
    far.close()
    two.close()


@pytest.mark.parametrize("kind", ["mapped", "fetched"])
def test_who_reads_too_late_does_not_take_what_lies_there_by_then(kind: str) -> None:
    """A taker that stood still: the giver has let go of the page meanwhile, and another prompt's is there."""
    with claimed(kind) as (two, loans, channel, far):
        load = two.taker.load([PageOrigin(LeasePeer("here", 1, "loan"))], [], False)
        load.keys, load._left = [b"k"], {0}
        read = far.read

        def late(rows: Any) -> Any:
            loans.finish("loan")
            _until(lambda: loans.num_free == 1)
            assert loans.reserve("another", [b"o"])
            loans.fill("another", [b"o"], np.full((1, WORDS), 8, np.int32))
            return read(rows)

        far.read = late  # type: ignore[method-assign]
        giver, pieces = ProducerConnection(load.sources[0], channel, WORDS), PartialPages(load, range(1), WORDS, 1)
        giver.region = far
        giver.request_pages(load, load.keys)
        with pytest.raises(ProtocolError):
            giver.receive_pages(load, pieces)
        assert not load._came and load._brought == 0


@pytest.mark.parametrize("kind", ["mapped", "fetched"])
def test_a_row_beyond_the_memory_is_no_page(kind: str) -> None:
    with claimed(kind) as (_, _, _, far):
        assert (far.read([0]) == 7).all()
        with pytest.raises(ProtocolError, match="lies nowhere"):
            far.read([0, 1])


# ------------------------------------------------------------------------------------------------- an engine that ends


class Held(Copying):
    """A library that writes on, whatever it is told, until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def start_read(self, peer: str, addresses: Sequence[int], into: PageRows) -> Any:
        self.begun += 1
        return HeldMoving(self)


class HeldMoving:
    def __init__(self, mover: Held) -> None:
        self._mover = mover

    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        return self._mover.may_end.is_set()


class Quiet:
    """A connection to somebody who has memory, and says nothing more."""

    def receive(self, _: Any) -> RegionAddress:
        return RegionAddress(b"a test", 4096, 9)

    def check_open(self) -> None: ...


def reading(means: Transport) -> tuple[threading.Thread, "list[str]", "weakref.ref[Any]"]:
    """A thread in the midst of a transfer; why it ends; and the memory that is written to."""
    opening, said = means.open_region(60.0), list[str]()
    assert opening is not None
    far: Any = opening(Quiet(), WORDS)  # type: ignore[arg-type]

    def read() -> None:
        with pytest.raises(ProtocolError) as error:
            far.read([1, 2])
        said.append(str(error.value))

    lent, borrow = list[Any](), far._buffers.acquire

    def noted() -> PageRows:
        rows = borrow()
        lent.append(weakref.ref(rows))
        return rows

    far._buffers.acquire = noted
    thread = threading.Thread(target=read)
    thread.start()
    _until(lambda: means.transfer_engine.begun > 0)  # type: ignore[union-attr]
    return thread, said, lent[0]


def test_an_engine_that_ends_waits_for_what_is_being_read() -> None:
    mover = Held()
    means = Transport("a test", mover)
    thread, said, _ = reading(means)
    ending = threading.Thread(target=means.close)
    ending.start()
    thread.join(30)
    assert said == ["the engine ends"] and ending.is_alive() and not mover.closed
    mover.may_end.set()
    ending.join(30)
    assert mover.closed
    with pytest.raises(ProtocolError, match="the engine ends"):
        means.buffer_pool.for_width(WORDS)  # type: ignore[union-attr]


@pytest.mark.slow
def test_memory_that_is_written_to_outlives_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(moved_module, "CLOSE_SECONDS", 0.01)
    mover = Held()
    means = Transport("a test", mover)
    thread, _, memory = reading(means)
    means.close()
    assert "their memory stays until they do" in caplog.text and not mover.closed
    thread.join(30)
    mover.offered.clear()  # a library need not keep it either
    del means
    gc.collect()
    assert memory() is not None and not mover.closed
    mover.may_end.set()
    _until(lambda: mover.closed)
    _until(lambda: gc.collect() is not None and memory() is None)


# -------------------------------------------------------------------------------------------------------------- NIXL


@pytest.fixture
def nixl() -> Iterator[NixlEngine]:
    pytest.importorskip("nixl")
    mover = NixlEngine("lo")
    yield mover
    mover.close()


def test_nixl_moves_what_one_engine_says(nixl: NixlEngine) -> None:
    other = NixlEngine("lo")
    two, theirs = Two(**ENGINES["few pages, chunks"]), Served(False, **ENGINES["few pages, chunks"])
    moved(two, nixl, other, 10.0)
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks)
    assert two.taker.counts()["pages"] > 0 and two.taker.counts()["failed"] == 0
    two.close()
    other.close()
    with pytest.raises(ProtocolError, match="NIXL cannot reach it"):
        nixl.connect(b"nobody")
    with pytest.raises(ProtocolError, match="the engine ends"):
        other.metadata()
    with pytest.raises(ProtocolError, match="the engine ends"):
        other.start_read("peer", [4096], np.zeros((1, WORDS), np.int32))


def test_nixl_listens_where_it_is_told(nixl: NixlEngine) -> None:
    """UCX has ports of its own, at which nothing asks for a key."""
    at = {each.laddr.ip for each in psutil.Process(os.getpid()).net_connections("tcp") if each.status == "LISTEN"}
    assert at <= {"127.0.0.1", "::1"}
    with pytest.raises(ValueError, match="UCX cannot begin at nowhere0"):
        NixlEngine("nowhere0")


def test_mooncake_moves_what_one_engine_says() -> None:
    """It listens at all addresses for the time of the test."""
    pytest.importorskip("mooncake.engine")
    one, other = MooncakeEngine("127.0.0.1", "tcp"), MooncakeEngine("127.0.0.1", "tcp")
    two, theirs = Two(**ENGINES["few pages, chunks"]), Served(False, **ENGINES["few pages, chunks"])
    moved(two, one, other, 10.0)
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks)
    assert two.taker.counts()["pages"] > 0 and two.taker.counts()["failed"] == 0
    with pytest.raises(ProtocolError, match="no address of Mooncake's"):
        one.connect(b"nobody")
    into = np.zeros((1, WORDS), np.int32)
    other.register_buffer(into)
    reading = other.start_read("127.0.0.1:1", [4096], into)
    _until(reading.cancel)
    with pytest.raises(ProtocolError, match="Mooncake could not read there"):
        reading.done()
    two.close()
    for mover in (one, other):
        mover.close()
        with pytest.raises(ProtocolError, match="the engine ends"):
            mover.metadata()


LIBRARIES = {"NIXL": ("nixl", lambda: NixlEngine("lo")),
             "Mooncake": ("mooncake.engine", lambda: MooncakeEngine("127.0.0.1", "tcp"))}  # fmt: skip


@pytest.mark.parametrize("whose", ["the giver", "the taker"])
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_engine_may_end_while_a_library_reads(name: str, whose: str) -> None:
    """Memory that is read or written after it was let go of would end the process: here it is unmapped."""
    module, make = LIBRARIES[name]
    pytest.importorskip(module, reason=f"{name} is not installed")
    words, count, read = 2**16, 32, threading.Event()
    giving, taking = Transport("a test", make()), Transport("a test", make())
    memory = mmap.mmap(-1, 4 * words * count)
    rows: PageRows = np.ndarray((count, words), np.int32, memory)
    rows[:] = np.arange(count)[:, None]
    assert giving.transfer_engine is not None
    ExposedRegion(giving.transfer_engine, rows)
    opening, told, said = (
        taking.open_region(10.0),
        RegionAddress(giving.transfer_engine.metadata(), rows.ctypes.data, count),
        list[str](),
    )
    assert opening is not None

    class Told(Quiet):
        def receive(self, _: Any) -> RegionAddress:
            return told

    def loop() -> None:
        far = opening(Told(), words)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError) as error:
            while True:
                assert (far.read(range(count))[:, -1] == np.arange(count)).all()
                read.set()
        said.append(str(error.value))

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for each in threads:
        each.start()
    assert read.wait(60)
    (giving if whose == "the giver" else taking).close()
    if whose == "the giver":
        del giving, rows, memory
        gc.collect()
    for each in threads:
        each.join(60)
    wanted = "could not read there" if whose == "the giver" else "the engine ends"
    assert len(said) == 2 and all(wanted in each for each in said), said
    (taking if whose == "the giver" else giving).close()


def test_mooncake_listens_everywhere_only_where_that_is_said() -> None:
    here = KVTransferConfig(kv_connector="MooncakeConnector", kv_role="kv_both")
    for settings in (here, dataclasses.replace(here, kv_ip="0.0.0.0")):
        with pytest.raises(ValueError, match="Mooncake listens at all addresses and checks no key; on a private"):
            transport_of(settings, True)
    for name in ("Mooncake", "Nixl"):
        with pytest.raises(ValueError, match="others could take pages, which are prompts"):
            transport_of(dataclasses.replace(here, kv_connector=f"{name}Connector", kv_ip="0.0.0.0"), False)


@pytest.mark.parametrize(("name", "extra"), [("Nixl", "nixl"), ("Mooncake", "mooncake")])
def test_without_a_library_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    for module in ("nixl", "nixl._api", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, module, None)
    settings = KVTransferConfig(
        kv_connector=f"{name}Connector",
        kv_role="kv_both",
        kv_ip="0.0.0.0",
        kv_connector_extra_config={"host": "127.0.0.1"},
    )
    with pytest.raises(ValueError, match=rf"{name}Connector needs .*pip install '.*\[{extra}\]'.* use TCP"):
        transport_of(settings, True)
