"""A store that answers when it does, late, wrongly or not at all: what is said is what is said without it."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quintet.engine.kv_transfer import async_store as late
from quintet.engine.kv_transfer.async_store import AsyncStoreConnector, PageStore
from quintet.engine.kv_transfer.connector import PageRows
from tests.engine.kv_transfer.test_manager import FEW, WORDS, Connected, beginnings, interrupted
from tests.engine.test_overlap import ENGINES, Served, again, traffic
from tests.helpers.servers.serving import until

TIMEOUT = 60.0  # longer than any test waits


class Shelf:
    """A store in a dict, which loses each so-and-so-manieth page and refuses others; closed `gate`: it hangs."""

    def __init__(self, loses: int = 0, refuses: int = 0, timeout: float = TIMEOUT) -> None:
        self.timeout, self.loses, self.refuses = timeout, loses, refuses
        self.pages: dict[bytes, PageRows] = {}
        self.gate, self.asked, self.closed = threading.Event(), list[bytes](), False
        self.gets = self.puts = 0
        self.gate.set()
        self.fails: str | None = None  # what everything raises

    def _enter(self) -> None:
        self.gate.wait()
        if self.fails is not None:
            raise RuntimeError(self.fails)

    def has(self, key: bytes) -> bool:
        self.asked.append(key)
        self._enter()
        return key in self.pages

    def get(self, key: bytes) -> PageRows:
        self._enter()
        self.gets += 1
        if self.loses and self.gets % self.loses == 0:
            self.pages.pop(key, None)
        if key not in self.pages:
            raise ValueError("lost")
        return self.pages[key]

    def put(self, key: bytes, row: PageRows) -> bool:
        self._enter()
        self.puts += 1
        if self.refuses and self.puts % self.refuses == 0:
            return False
        assert row.shape == (WORDS,)
        self.pages[key] = row.copy()
        return True

    def close(self) -> None:
        self.closed = True


Begun = Callable[[Shelf], AsyncStoreConnector]


@pytest.fixture
def begun() -> Iterator[Begun]:
    made = list[tuple[AsyncStoreConnector, Shelf]]()

    def begin(shelf: Shelf) -> AsyncStoreConnector:
        made.append((AsyncStoreConnector("a shelf", lambda: shelf, WORDS), shelf))
        return made[-1][0]

    yield begin
    for connector, shelf in made:
        shelf.gate.set()
        connector.close()


def idle(connector: AsyncStoreConnector) -> bool:
    return not (connector._writes or connector._asks or connector._queued or connector._busy)


@pytest.mark.parametrize("kind", [{}, {"loses": 4}, {"loses": 1}, {"refuses": 3, "loses": 3}], ids=str)
def test_random_traffic_says_what_it_says_without_a_store(kind: dict[str, int], begun: Begun) -> None:
    connector, theirs = begun(Shelf(**kind)), Served(False, **ENGINES["few pages, chunks"])
    ours = Connected(connector, **ENGINES["few pages, chunks"])
    for seed in range(2):
        asks = traffic(seed)
        wanted = theirs.run(*asks)
        assert ours.run(*asks) == wanted, f"traffic {seed}"
        assert until(lambda: idle(connector))
        assert ours.run(*again(asks, wanted)) == theirs.run(*again(asks, wanted)), f"traffic {seed}, second turn"
    counts = ours.counts
    assert counts.pages_stored > 0 and (counts.pages_loaded > 0) == (kind.get("loses") != 1)
    assert (counts.pages_failed > 0) == bool(kind.get("loses"))


def test_a_second_engine_finds_what_the_first_has_kept(begun: Begun) -> None:
    shelf, asks = Shelf(), beginnings(3)
    first, second = Connected(begun(shelf)), Connected(begun(shelf))
    wanted = first.run(*asks)
    first.kv_transfer.after_compute(first.engine.scheduler, running=False)
    assert until(lambda: idle(first.kv_transfer.connector))  # type: ignore[arg-type]
    assert second.run(*asks) == wanted
    assert second.counts.pages_loaded == 3 * 9, "of ten pages each, the last of which a token is computed of"


def test_what_is_behind_a_page_that_is_not_there_is_not_asked_for(begun: Begun) -> None:
    shelf = Shelf()
    shelf.pages = {b"1": np.zeros(WORDS, np.int32), b"3": np.zeros(WORDS, np.int32)}
    lookup = begun(shelf).look_up([b"1", b"2", b"3"])
    assert until(lambda: lookup.found is not None)
    assert lookup.found == [True, False, False] and shelf.asked == [b"1", b"2"]


def test_a_store_that_hangs_costs_a_moment_and_then_none(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "CLOSE_SECONDS", 0.05)
    shelf, asks = Shelf(timeout=0.05), beginnings(4)
    shelf.gate.clear()
    connector, wanted = begun(shelf), Served(False).run(*asks)
    ours = Connected(connector)
    assert ours.run(*asks) == wanted
    assert until(lambda: connector.is_stuck)
    before = len(connector._asks)
    assert connector.look_up([b"1", b"2"]).found == [False, False], "it waits for who is known to hang"
    assert len(connector._asks) == before, "and asks it more and more"
    connector.close()
    assert connector._thread.is_alive() and not shelf.closed


def test_a_request_that_ends_while_it_is_looked_up_waits_for_nothing(begun: Begun) -> None:
    shelf = Shelf()
    shelf.gate.clear()
    ours, asks = Connected(begun(shelf)), beginnings(1)
    ours.engine.add(asks[0].admitted())
    ours.engine.step()
    assert ours.kv_transfer.num_waiting == 1
    ours.engine.abort([asks[0].name])
    assert ours.kv_transfer.num_waiting == 0 and not ours.kv_transfer._lookups
    shelf.gate.set()


def test_what_fails_is_said_once_and_computed(begun: Begun, caplog: pytest.LogCaptureFixture) -> None:
    shelf, asks = Shelf(), beginnings(4)
    shelf.fails = "no route to it"
    connector = begun(shelf)
    with caplog.at_level("WARNING"):
        assert Connected(connector).run(*asks) == Served(False).run(*asks)
        assert until(lambda: idle(connector))
    said = [each.getMessage() for each in caplog.records if each.name == late.__name__]
    assert said == ["a shelf fails: no route to it; what it has is computed"]


def test_what_waits_is_bounded_and_is_kept_when_it_is_closed(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "MAX_QUEUED_BYTES", 4 * WORDS * 3)
    shelf = Shelf()
    shelf.gate.clear()
    connector = begun(shelf)
    rows = np.arange(5 * WORDS, dtype=np.int32).reshape(5, WORDS)
    connector.store([bytes([at]) for at in range(5)], rows)
    assert connector.counts()["not_kept"] == 2
    shelf.gate.set()
    connector.close()
    assert sorted(shelf.pages) == [b"\0", b"\1", b"\2"] and shelf.closed
    assert connector.counts() == {"kept": 3, "not_kept": 2}


def test_what_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> PageStore:
        raise ValueError("nothing is there")

    with pytest.raises(ValueError, match="nothing is there"):
        AsyncStoreConnector("a shelf", refuses, WORDS)
    monkeypatch.setattr(late, "START_SECONDS", 0.05)
    gate, shelf = threading.Event(), Shelf()

    def hangs() -> PageStore:
        gate.wait()
        return shelf

    with pytest.raises(ValueError, match="a shelf has not begun within 0.05 s"):
        AsyncStoreConnector("a shelf", hangs, WORDS)
    gate.set()
    assert until(lambda: shelf.closed), "what begins too late goes on"


def test_after_ctrl_c_at_any_line_what_is_said_stays_the_same(begun: Begun) -> None:
    wanted = Served(False, **FEW).run(*beginnings(4))
    for at, said in interrupted(lambda at: begun(Shelf(loses=10)), 5003):
        assert said == wanted, at


def test_after_a_reset_nothing_of_before_is_found(begun: Begun) -> None:
    connector, asks = begun(Shelf()), beginnings(2)
    ours = Connected(connector, **FEW)
    wanted = ours.run(*asks)
    assert until(lambda: idle(connector))
    ours.engine.reset_prefix_cache()
    assert ours.run(*asks) == wanted and ours.counts.pages_loaded == 0
