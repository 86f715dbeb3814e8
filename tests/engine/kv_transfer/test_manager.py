"""Pages that come from elsewhere, from places that lose, delay, reorder and lie: what is said is what would be said
without. The device is behind the host, so that who copies too early, or lets go too early, is found out."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.kv_transfer.connector import KVConnector, Load, LoadedPages, PageRows
from quintet.engine.kv_transfer.manager import KVTransferManager
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.observability.stats import KVConnectorStats
from quintet.engine.request import CoreRequest, Request
from quintet.sampling_params import SamplingParams
from tests.engine.test_overlap import ENGINES, Ask, Said, Served, again, plain, traffic
from tests.helpers.platforms.null_engine import VOCAB, CtrlC

WORDS = 16  # of a row: 32 bytes of a page, up to where the next part would begin


class Odd(KVConnector):
    """Keeps pages in a dict, and does with them what a network may do."""

    def __init__(self, seed: int, loses: float = 0.0, delays: int = 0, drops: float = 0.0) -> None:
        super().__init__()
        self.rng, self.loses, self.delays, self.drops = random.Random(seed), loses, delays, drops
        self.pages: dict[bytes, np.ndarray[Any, Any]] = {}
        self.loads: list[OddLoad] = []
        self.cleared = 0

    def has(self, key: bytes) -> bool:
        return key in self.pages

    def load(self, keys: Sequence[bytes]) -> Load:
        assert len(set(keys)) == len(keys) > 0 and all(map(self.has, keys))
        self.loads.append(OddLoad(self, keys))
        return self.loads[-1]

    def store(self, keys: Sequence[bytes], rows: PageRows) -> None:
        assert rows.shape == (len(keys), WORDS)
        for key, row in zip(keys, rows, strict=True):
            if self.rng.random() >= self.drops:
                assert key not in self.pages or np.array_equal(self.pages[key], row), "a hash stands for two contents"
                self.pages[key] = row.copy()

    def clear(self) -> None:
        self.pages.clear()
        self.cleared += 1


class OddLoad(Load):
    """In any order, a few at a time, some of them never."""

    def __init__(self, connector: Odd, keys: Sequence[bytes]) -> None:
        self._connector, self._keys, self.canceled = connector, keys, False
        self._left = list(range(len(keys)))
        connector.rng.shuffle(self._left)
        self._rows = {key: connector.pages[key] for key in keys}
        self._delay = connector.rng.randint(0, connector.delays)

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> LoadedPages:
        self._connector.changed.set()
        self._delay -= 1
        if self._delay >= 0 or not self._left:
            return LoadedPages([], np.zeros((0, WORDS), np.int32))
        count = self._connector.rng.randint(1, min(most, len(self._left)))
        taken, self._left = self._left[:count], self._left[count:]
        failed = {at: "lost" for at in taken if self._connector.rng.random() < self._connector.loses}
        for at in failed:
            self._connector.pages.pop(self._keys[at], None)
        came = [at for at in taken if at not in failed]
        rows = np.stack([self._rows[self._keys[at]] for at in came]) if came else np.zeros((0, WORDS), np.int32)
        return LoadedPages(came, rows, failed)

    def cancel(self) -> None:
        self.canceled = True
        self._left = []


class Connected(Served):
    """With a connector."""

    def __init__(
        self,
        connector: KVConnector,
        overlap: bool = True,
        patience: float = 60.0,
        fails: bool = False,
        replaced: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:

        def make(prepared: EnginePlan, tables: KVCacheManager, _: Any) -> KVTransferManager:
            copies = PageCopier(prepared.ranks)
            assert copies.words == WORDS
            self.kv_transfer = KVTransferManager(connector, copies, tables, b"a model", patience, fails)
            return self.kv_transfer

        super().__init__(overlap, replaced={"make_kv_transfer": make, **replaced}, **settings)

    @property
    def counts(self) -> KVConnectorStats:
        return self.engine.stats().kv_connector


KINDS: dict[str, dict[str, Any]] = {
    "all comes": {},
    "some are lost": {"loses": 0.2},
    "all are lost": {"loses": 1.0},
    "late, some lost": {"delays": 12, "loses": 0.1},
    "some are not kept": {"drops": 0.4, "delays": 3},
}
FEW = {"num_pages": 17}


@pytest.mark.parametrize(
    ("how", "kind", "overlap"),
    [
        *(("few pages, chunks", kind, True) for kind in KINDS),
        ("few pages, chunks", "late, some lost", False),
        ("plenty of pages", "all comes", True),
        ("by priority", "some are lost", True),
        ("pages of one token", "late, some lost", True),
    ],
)
def test_random_traffic_says_what_it_says_without_a_connector(how: str, kind: str, overlap: bool) -> None:
    connector, theirs = Odd(len(kind), **KINDS[kind]), Served(False, **ENGINES[how])
    ours = Connected(connector, overlap, **ENGINES[how])
    for seed in range(3):
        asks = traffic(seed)
        wanted = theirs.run(*asks)
        assert ours.run(*asks) == wanted, f"traffic {seed}"
        assert ours.run(*again(asks, wanted)) == theirs.run(*again(asks, wanted)), f"traffic {seed}, second turn"
    counts = ours.counts
    assert counts.pages_stored > 0
    if "few pages" in how:
        assert counts.pages_loaded + counts.pages_failed > 0, "nothing was asked for"
        assert (counts.pages_loaded > 0) == (kind != "all are lost")
        assert (counts.pages_failed > 0) == bool(KINDS[kind].get("loses"))


def beginnings(count: int, length: int = 40) -> list[Ask]:
    rng = random.Random(count)
    return [Ask(f"{at}", [rng.randrange(VOCAB) for _ in range(length)], plain(4)) for at in range(count)]


def filled(connector: KVConnector, **more: Any) -> tuple[Connected, list[Ask], dict[str, Said]]:
    """An engine of few pages, which has computed more beginnings than it has room for."""
    ours, asks = Connected(connector, **{**FEW, **more}), beginnings(6)
    return ours, asks, ours.run(*asks)


def test_what_was_driven_out_comes_back_and_is_not_computed() -> None:
    ours, asks, said = filled(Odd(1))
    before = ours.engine.stats().steps.num_prompt_tokens
    assert ours.run(*asks) == said
    computed = ours.engine.stats().steps.num_prompt_tokens - before
    assert computed <= 6 * 4, "no more than the last page of each"
    stats = ours.engine.stats()
    hits = stats.scheduler.external_hits
    assert hits >= 5 * 36 and stats.scheduler.cached_tokens + computed == 6 * 40
    assert stats.kv_connector.external_queries >= hits


def test_others_go_past_one_that_waits_for_its_pages() -> None:
    connector = Odd(2)
    ours, asks, said = filled(connector, num_pages=30)
    connector.delays, connector.rng = 10**9, random.Random(1)
    for ask in asks[:2]:
        ours.engine.add(ask.admitted())
    ours.engine.add(Ask("other", [5, 6, 7], plain(4)).admitted())
    heard: list[str] = []
    while "other" not in heard:
        heard += [delta.request_id for delta in ours.engine.step() if delta.finish_reason]
        ours.engine.check_integrity()
    assert ours.kv_transfer.num_waiting == 1 and heard == ["other"], "the second waits for its turn"
    ours.engine.abort([ask.name for ask in asks])
    assert all(load.canceled for load in connector.loads if not load.done) and ours.kv_transfer.num_waiting == 0
    ours.engine.check_integrity()
    assert ours.engine.scheduler.pool.num_used == 0
    connector.delays = 0
    assert ours.run(*asks) == said


@pytest.mark.parametrize("fails", [False, True])
def test_a_page_that_is_lost_costs_a_computation_or_the_request(fails: bool) -> None:
    connector = Odd(3)
    ours, asks, said = filled(connector, fails=fails)
    connector.loses = 1.0
    got = ours.run(*asks[:1])
    if fails:
        assert (got["0"].reason, got["0"].tokens) == ("error", [])
        assert "could not be loaded: lost" in (got["0"].error or "")
        got = ours.run(*asks[:1])  # it is not there any more
    assert got["0"] == said["0"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_does_not_come_in_time_is_not_waited_for(fails: bool) -> None:
    connector = Odd(4)
    ours, asks, said = filled(connector, patience=0.05, fails=fails)
    connector.delays, connector.rng = 10**9, random.Random(1)
    got = ours.run(*asks[:1])
    assert (got["0"].reason == "error") == fails and (fails or got == {"0": said["0"]})
    assert connector.loads[-1].canceled and ours.counts.pages_failed > 0


def test_nothing_of_before_is_found_after_a_reset() -> None:
    connector = Odd(5)
    ours, asks, said = filled(connector)
    before = set(connector.pages)
    connector.delays = 10**9
    for ask in asks[:2]:
        ours.engine.add(ask.admitted())
    ours.engine.step()
    ours.engine.reset_prefix_cache()
    ours.engine.check_integrity()
    assert connector.cleared == 1 and ours.kv_transfer.num_waiting == 0
    connector.delays = 0
    while ours.engine.busy:
        ours.engine.step()
    assert ours.run(*asks) == said
    assert connector.pages and not before & set(connector.pages), "what comes later has keys of its own"


def test_what_a_failed_step_wrote_goes_nowhere() -> None:
    for where in ("launch", "run", "wait"):
        connector = Odd(6)
        ours, asks = Connected(connector), beginnings(3)
        ours.work.fails.append((where, 0, RuntimeError("on fire")))
        got = ours.run(*asks)
        assert {said.reason for said in got.values()} >= {"error"}
        kept = dict(connector.pages)
        said = ours.run(*asks)
        assert said == Served(False).run(*asks)
        for key, row in kept.items():
            assert np.array_equal(connector.pages[key], row)


def interrupted(make: Callable[[int], KVConnector], step: int) -> Iterator[tuple[int, dict[str, Said]]]:
    """After a Ctrl-C at every so many-th line, with a connector each: what is said then."""
    asks = beginnings(4)
    for at in range(0, 60000, step):
        ours = Connected(make(at), **FEW)
        ours.run(*asks)
        with CtrlC(at) as ctrl_c:
            ours.run(*asks)
        if not ctrl_c.came:
            return
        ours.engine.abort([ask.name for ask in asks])
        ours.engine.check_integrity()
        yield at, ours.run(*asks)
    raise AssertionError("there were more lines than were tried; raise the range")


def test_after_ctrl_c_at_any_line_what_is_said_stays_the_same() -> None:
    wanted = Served(False, **FEW).run(*beginnings(4))
    for at, said in interrupted(lambda at: Odd(at, loses=0.1, delays=3), 1201):
        assert said == wanted, at


def test_a_connector_that_breaks_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    connector = Odd(7)
    ours, asks, said = filled(connector)

    def broken(*_: Any) -> Any:
        raise OSError("no room")

    connector.store = broken  # type: ignore[method-assign]
    more = [Ask(f"more {ask.name}", [*ask.prompt[::-1]], plain(4)) for ask in asks]
    assert {each.reason for each in ours.run(*more).values()} == {"length"}
    assert "pages were not copied" in caplog.text


def test_tenants_with_salts_of_their_own_find_nothing_of_each_other() -> None:
    connector = Odd(8)
    ours = Connected(connector, **FEW)
    prompt = beginnings(1)[0].prompt
    for salt in (b"a", b"b"):
        ours.engine.add(_salted(prompt, salt))
        while ours.engine.busy:
            ours.engine.step()
    assert ours.engine.stats().scheduler.external_hits == ours.engine.stats().scheduler.prefix_hits == 0
    assert len(connector.pages) == 2 * (len(prompt) // 4)


def _salted(prompt: list[int], salt: bytes) -> Any:
    return dataclasses.replace(Ask(salt.decode(), prompt, plain(1)).admitted(), salt=salt)


def test_pages_behind_a_window_are_not_asked_for() -> None:
    tables = KVCacheManager(PagePool(20), 4, (KVCacheGroup(), KVCacheGroup(window=8)))
    request = Request(CoreRequest("0", list(range(21)), SamplingParams(), (0, 0), 1), 0)
    wanted, every = tables.missing_hashes(request, lambda digest: True), tables.group_hashes(request)
    assert len(every) == 2 * 5, "two groups, and five full pages before the last token"
    assert wanted == [*every[0:6:2], *every[6:10]], "the token after 20 sees 13 to 19: its pages 3 and 4"


def test_pages_that_are_here_are_not_asked_for() -> None:
    """The beginning that is cached here is as long as the one that is known there: nothing is to be brought."""
    tables = KVCacheManager(PagePool(20), 4, (KVCacheGroup(),))
    request = Request(CoreRequest("0", list(range(21)), SamplingParams(), (0, 0), 1), 0)
    every = tables.group_hashes(request)
    for page, digest in zip(tables.pool.allocate(3), every, strict=False):
        assert tables.pool.commit(page, digest)
    assert tables.find_prefix(request).tokens == 3 * 4
    assert tables.missing_hashes(request, lambda digest: digest in every[:3]) == []
    assert tables.missing_hashes(request, lambda digest: digest in every[:4]) == every[:4]


def test_rows_of_a_table_are_made_anew_only_where_a_page_is_added() -> None:
    tables = KVCacheManager(PagePool(20), 4, (KVCacheGroup(),))
    request = Request(CoreRequest("0", list(range(21)), SamplingParams(), (0, 0), 1), 0)
    tables.start_from(request, tables.find_prefix(request))
    tables.reserve(request, 5)
    made = request.table_rows[0] = np.array(request.pages[0], np.int32)
    tables.reserve(request, 8)
    assert len(request.pages[0]) == 2 and request.table_rows[0] is made
    tables.reserve(request, 9)
    assert len(request.pages[0]) == 3 and request.table_rows[0] is None
