"""Pages that a library fetches out of the giver's memory: whatever it does, what is said is what one engine says."""

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quintet.engine.elsewhere.handoff import Peer
from quintet.engine.elsewhere.loans import Loans
from quintet.engine.elsewhere.memory import Far, Mapped, lend
from quintet.engine.elsewhere.moved import BUFFERS, Lent, Moved, Staging
from quintet.engine.elsewhere.nixl_mover import NixlMover
from quintet.engine.elsewhere.wire import Broken, Channel
from tests.helpers.mover import Copying
from tests.unit.test_elsewhere import WORDS, beginnings
from tests.unit.test_overlap import ENGINES, Served, traffic
from tests.unit.test_transfer import FACTS, KEY, Two, _until

PATIENCE = 0.1  # seconds


def moved(two: Two, giving: Any, taking: Any, patience: float = PATIENCE) -> Staging:
    """From now on pages are fetched by these, which may be one."""
    two.giver.way, two.giver.share = "a test", Lent(giving, two.loans.rows)
    staging = Staging(taking, WORDS)
    opening = functools.partial(Moved, mover=taking, staging=staging, patience=patience)
    two.taker._way = two.taker._way._replace(open=opening, name="a test")
    return staging


@pytest.mark.parametrize("kind", ["whole", "late", "torn", "silent", "cut", "strange"])
def test_random_traffic_says_what_one_engine_says(kind: str) -> None:
    two, mover = Two(**ENGINES["few pages, chunks"]), Copying(kind)
    theirs = Served(False, **ENGINES["few pages, chunks"])
    moved(two, mover, mover)
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks), f"traffic {seed}"
    assert mover.begun > 0 and two.books.counts.loaded > 0
    assert (two.taker.counts()["failed"] > 0) == (kind not in ("whole", "late"))
    _until(lambda: not mover.met)
    two.close()


@pytest.mark.parametrize("kind", ["whole", "cut"])
def test_a_bad_connection_beside_a_library_costs_computation_alone(kind: str) -> None:
    two, mover = Two(kind, 3), Copying()
    moved(two, mover, mover)
    asks = beginnings(6)
    assert two.run(*asks) == Served(False).run(*asks)
    assert (two.books.counts.failures > 0) == (kind == "cut")
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
    staging, given = Staging(mover, WORDS), []
    for _ in range(BUFFERS):
        rows = staging.borrow()
        assert all(rows is not each for each in given)
        given.append(rows)
        moving = mover.begin("peer", [0], rows[:1])
        moving._held = 10**6
        staging.give_back(rows, moving)
    with pytest.raises(Broken, match="were given up, and have not ended"):
        staging.borrow()
    moving._held = 0
    assert staging.borrow() is given[-1], "the last has ended"


def test_the_other_side_must_be_of_the_same_connector() -> None:
    two, mover = Two(), Copying()
    moved(two, mover, mover)
    for way, why in (("", "pages are given by a test, and wanted by TCP"), ("x", "given by a test, and wanted by x")):
        channel = two.net.connect(Peer("here", 1, "loan"))
        with pytest.raises(Broken, match=why):
            channel.claim(KEY, FACTS, way)
    two.close()


def shared(channel: Channel, loans: Loans) -> None:
    lend(channel, loans.descriptor)


@contextlib.contextmanager
def claimed(kind: str) -> Iterator[tuple[Two, Loans, Channel, Far]]:
    """A loan of one page, and a connection to who gives it; its memory is mapped or fetched."""
    two, loans, mover = Two(), Loans(4 * WORDS, WORDS, 60.0, shared=kind == "mapped"), Copying()
    two.giver._loans, two.giver.way = loans, "a test"
    two.giver.share = functools.partial(shared, loans=loans) if kind == "mapped" else Lent(mover, loans.rows)
    ours, theirs = socket.socketpair()  # descriptors do not pass by way of somebody in the middle
    threading.Thread(target=two.giver.serve, args=(theirs, "a test"), daemon=True).start()
    channel = Channel(ours, 5.0, 0)
    channel.claim(KEY, FACTS, "a test")
    far: Far = Mapped(channel, WORDS) if kind == "mapped" else Moved(channel, mover, Staging(mover, WORDS), 1.0)
    assert loans.promise("loan", [b"k"])
    loans.fill("loan", [b"k"], np.full((1, WORDS), 7, np.int32))
    yield two, loans, channel, far
    far.close()
    two.close()


@pytest.mark.parametrize("kind", ["mapped", "fetched"])
def test_who_reads_too_late_does_not_take_what_lies_there_by_then(kind: str) -> None:
    """A taker that stood still: the giver has let go of the page meanwhile, and another prompt's is there."""
    with claimed(kind) as (two, loans, channel, far):
        load = two.taker.load(Peer("here", 1, "loan"), [], False)
        load.keys, load._left = [b"k"], {0}
        read = far.read

        def late(rows: Any) -> Any:
            loans.end("loan")
            _until(lambda: loans.num_free == 1)
            assert loans.promise("another", [b"o"])
            loans.fill("another", [b"o"], np.full((1, WORDS), 8, np.int32))
            return read(rows)

        far.read = late  # type: ignore[method-assign]
        with pytest.raises(Broken):
            two.taker._ask(channel, load, range(1), far)
        assert not load._came and load._brought == 0


@pytest.mark.parametrize("kind", ["mapped", "fetched"])
def test_a_row_beyond_the_memory_is_no_page(kind: str) -> None:
    with claimed(kind) as (_, _, _, far):
        assert (far.read([0]) == 7).all()
        with pytest.raises(Broken, match="lies nowhere"):
            far.read([0, 1])


# -------------------------------------------------------------------------------------------------------------- NIXL


@pytest.fixture
def nixl() -> Iterator[NixlMover]:
    pytest.importorskip("nixl")
    mover = NixlMover("lo")
    yield mover
    mover.close()


def test_nixl_moves_what_one_engine_says(nixl: NixlMover) -> None:
    other = NixlMover("lo")
    two, theirs = Two(**ENGINES["few pages, chunks"]), Served(False, **ENGINES["few pages, chunks"])
    moved(two, nixl, other, 10.0)
    for seed in range(2):
        asks = traffic(seed)
        assert two.run(*asks) == theirs.run(*asks)
    assert two.taker.counts()["pages"] > 0 and two.taker.counts()["failed"] == 0
    two.close()
    other.close()
    with pytest.raises(Broken, match="NIXL cannot reach it"):
        nixl.meet(b"nobody")


def test_nixl_listens_where_it_is_told(nixl: NixlMover) -> None:
    """UCX has ports of its own, at which nothing asks for a key."""
    import psutil

    at = {each.laddr.ip for each in psutil.Process(os.getpid()).net_connections("tcp") if each.status == "LISTEN"}
    assert at <= {"127.0.0.1", "::1"}
    with pytest.raises(ValueError, match="UCX cannot begin at nowhere0"):
        NixlMover("nowhere0")


def test_without_nixl_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from quintet.engine.elsewhere.nixl_mover import library

    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ValueError, match=r"NixlConnector needs NIXL .*pip install 'quintet\[nixl\]', or use TCP"):
        library()
