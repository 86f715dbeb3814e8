"""Ranks agree on pages that come to each at a moment of its own: each test plays all ranks, a thread for each."""

import dataclasses
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quintet.config import EngineConfig
from quintet.engine.kv_transfer.connector import Load, LoadedPages
from quintet.engine.kv_transfer.factory import make_kv_transfer
from quintet.engine.kv_transfer.multi_source import MultiLoad
from quintet.engine.kv_transfer.offload.tiers import TieredConnector
from quintet.engine.kv_transfer.p2p.transfers import FailedLoad
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.kv_transfer.rank_agreement import MAX_LEAD, AgreedLoad, RankAgreement
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import Channel
from tests.engine.test_overlap import SETTINGS
from tests.helpers.platforms.behind import Work, behind
from tests.helpers.platforms.null_engine import folder

WORDS = 4


class Table(Channel):
    """Where threads exchange notes, of 1000 bytes at most."""

    def __init__(self, rank: int, notes: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._notes, self._barrier = rank, notes, barrier
        self.exchanges = 0

    def exchange(self, message: bytes) -> list[bytes]:
        assert len(message) <= 1000
        self.exchanges += 1
        self._notes[self._rank] = message
        self._barrier.wait(30)
        found = list(self._notes)
        self._barrier.wait(30)
        return found

    def broadcast(self, message: bytes) -> None:
        raise AssertionError

    def receive(self) -> bytes:
        raise AssertionError

    def abort(self, reason: str) -> None:
        raise AssertionError

    aborted = ""


class Shuffled(Load):
    """Pages that come in an order of this rank's own; some do not."""

    def __init__(self, seed: int, count: int, lost: Sequence[int] = (), stuck: bool = False) -> None:
        self._rng, self._left, self._lost, self._stuck = random.Random(seed), list(range(count)), set(lost), stuck
        self._rng.shuffle(self._left)
        self.canceled = False

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> LoadedPages:
        count = 0 if self._stuck else self._rng.randint(0, min(most, len(self._left)))
        taken, self._left = self._left[:count], self._left[count:]
        came = [at for at in taken if at not in self._lost]
        rows = np.repeat(np.array(came, np.int32)[:, None], WORDS, 1)
        return LoadedPages(came, rows, {at: "it is damaged" for at in taken if at in self._lost})

    def cancel(self) -> None:
        self.canceled, self._left = True, []


class Ordered(Load):
    """Pages that come in a given order, at most so many at a time, and none at some meetings."""

    def __init__(self, order: Sequence[int], rng: random.Random, fastest: int) -> None:
        self._left, self._rng, self._fastest = list(order), rng, fastest

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> LoadedPages:
        count = min(most, self._rng.randint(0, self._fastest))
        came, self._left = self._left[:count], self._left[count:]
        return LoadedPages(came, np.repeat(np.array(came, np.int32)[:, None], WORDS, 1))

    def cancel(self) -> None:
        self._left = []


def played(size: int, part: Any) -> list[Any]:
    """What each rank's part gives, told its rank and its channel."""
    notes, barrier = [b""] * size, threading.Barrier(size)

    def alone(rank: int) -> Any:
        try:
            return part(rank, Table(rank, notes, barrier))
        except BaseException:
            barrier.abort()  # nobody waits for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        waiting = [pool.submit(alone, rank) for rank in range(size)]
        errors = [error for each in waiting if (error := each.exception(60)) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in waiting]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_is_given_the_same_pages_at_the_same_meeting(size: int) -> None:
    lost = {0: [3], 1: [3, 700], 2: [1]}

    def part(rank: int, channel: Table) -> Any:
        council, turns = RankAgreement(channel, 60.0), list[tuple[list[int], dict[int, str]]]()
        load = council.agreed_load(Shuffled(rank, 5000, lost[rank]), 5000)
        while council.has_work:
            council.exchange(900)
            came = load.take(500)
            assert came.rows.shape == (len(came.indices), WORDS)
            assert [row[0] for row in came.rows.tolist()] == came.indices, "each row is of its own place"
            turns.append((came.indices, came.failed))
        assert channel.exchanges > len(turns), "long notes come in pieces"
        return turns

    said = played(size, part)
    assert all(each == said[0] for each in said)
    failed = {place: why for _, gone in said[0] for place, why in gone.items()}
    assert set(failed) == {place for rank in range(size) for place in lost[rank]}
    assert all("it is damaged" in why and f"of {size}" in why for why in failed.values())
    came = [place for places, _ in said[0] for place in places]
    assert sorted([*came, *failed]) == list(range(5000))


def test_what_lies_beside_one_rank_alone_is_not_there() -> None:
    there = [[True, True, False, False], [True, False, True, False]]

    def part(rank: int, channel: Table) -> Any:
        council, request, other = RankAgreement(channel, 60.0), object(), object()
        council.look_up(request, lambda: there[rank])  # type: ignore[arg-type]
        council.look_up(other, lambda: there[rank])  # type: ignore[arg-type]
        council.drop(other)  # type: ignore[arg-type]
        assert council.has_work
        found = council.exchange(8)
        assert not council.has_work
        return list(found.values())

    assert played(2, part) == [[[True, False, False, False]]] * 2


def test_a_rank_to_which_nothing_comes_gives_up_for_all() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, failed = RankAgreement(channel, 0.01 if rank else 60.0), dict[int, str]()
        inner = Shuffled(rank, 4, stuck=rank == 1)
        load = council.agreed_load(inner, 4)
        while council.has_work:
            council.exchange(8)
            came = load.take(8)
            assert not came.indices
            failed.update(came.failed)
        return failed

    said = played(2, part)
    assert said[0] == said[1] == dict.fromkeys(range(4), "rank 1 of 2: nothing more came within 0.01 s")


def test_a_load_that_nobody_wants_any_more_is_not_talked_of() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, inner = RankAgreement(channel, 60.0), Shuffled(rank, 4)
        council.agreed_load(inner, 4).cancel()
        return inner.canceled and not council.has_work

    assert played(2, part) == [True, True]


def test_a_load_of_which_a_part_will_not_come_gives_the_rest() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, came, failed = RankAgreement(channel, 60.0), list[int](), dict[int, str]()
        agreed = council.agreed_load(Shuffled(rank, 6), 6)
        load = MultiLoad([(agreed, [0, 2, 4, 6, 8, 10]), (FailedLoad(2, "other ranks"), [1, 3])])
        while not load.done:
            if council.has_work:
                council.exchange(3)
            arrived = load.take(3)
            came += arrived.indices
            failed.update(arrived.failed)
        return sorted(came), failed

    assert played(2, part) == [([0, 2, 4, 6, 8, 10], {1: "other ranks", 3: "other ranks"})] * 2


# ------------------------------------------------------------------------------------- how much waits for a slow rank


def all_of(load: AgreedLoad, council: RankAgreement, most: int) -> tuple[list[int], int]:
    """What a load gives in the end, and the most rows that it held behind a meeting."""
    came, held, meetings = list[int](), 0, 0
    while council.has_work:
        council.exchange(most)
        held = max(held, len(load.rows))
        came += load.take(most).indices
        meetings += 1
        assert meetings < 5000, "nothing comes any more"
    return came, held


def test_a_fast_rank_holds_few_pages_while_a_slow_one_lags() -> None:
    most, count = 4, 600

    def part(rank: int, channel: Table) -> Any:
        council = RankAgreement(channel, 60.0)
        inner = Ordered(range(count), random.Random(rank), 1 if rank else most)
        return all_of(council.agreed_load(inner, count), council, most)

    for came, held in played(2, part):
        assert came == list(range(count)) and held <= MAX_LEAD * most


def test_ranks_that_hold_different_pages_wait_for_each_other_but_not_for_ever() -> None:
    """One has what the other has last."""
    most, count = 2, 64

    def part(rank: int, channel: Table) -> Any:
        council = RankAgreement(channel, 60.0)
        order = list(range(count)) if rank else list(reversed(range(count)))
        return all_of(council.agreed_load(Ordered(order, random.Random(rank), most), count), council, most)

    for came, held in played(2, part):
        assert sorted(came) == list(range(count)) and held >= count // 2 - most


@pytest.mark.parametrize("seed", range(12))
def test_whatever_order_pages_come_in_all_come_and_none_runs_far_ahead(seed: int) -> None:
    rng = random.Random(seed)
    size, most, counts = rng.choice([2, 3]), rng.randint(1, 5), [rng.randint(1, 50) for _ in range(rng.randint(1, 4))]
    lost = {place for place in range(50) if rng.random() < rng.choice([0.0, 0.1])}

    def part(rank: int, channel: Table) -> Any:
        own, council, given = random.Random(f"{seed} {rank}"), RankAgreement(channel, 60.0), list[Any]()
        loads = []
        for count in counts:
            order, kind = list(range(count)), own.randrange(3)
            if kind:
                own.shuffle(order) if kind == 1 else order.reverse()
            inner: Load = Ordered(order, own, own.randint(1, most))
            if lost and own.random() < 0.5:
                inner = Shuffled(own.randrange(99), count, sorted(lost))
            loads.append(council.agreed_load(inner, count))
        for _ in range(5000):
            if not council.has_work:
                return given
            share = max(1, MAX_LEAD * most // len(council._loads))
            council.exchange(most)
            assert all(0 <= load.lead <= share for load in loads if not load.done)
            for at, load in enumerate(loads):
                if not load.done:
                    came = load.take(most)
                    given += [(at, place, row[0]) for place, row in zip(came.indices, came.rows.tolist(), strict=True)]
                    given += [(at, place, None) for place in came.failed]
        raise AssertionError("nothing comes any more")

    said = played(size, part)
    assert all(each == said[0] for each in said)
    assert sorted((at, place) for at, place, _ in said[0]) == [
        (at, place) for at, count in enumerate(counts) for place in range(count)
    ]
    assert all(row is None or row == place for _, place, row in said[0])


def test_ranks_whose_parts_differ_in_size_take_in_as_many_pages() -> None:
    """And keep as many: what is given at a meeting, and what is there, is the same for all."""

    def part(rank: int, channel: Table) -> Any:
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, **SETTINGS, "page_size": 4 * 4**rank}
        config = EngineConfig.from_kwargs(model=str(folder()), device="null", **settings)
        prepared = prepare(config, behind(Work()))
        engine = launch(prepared, progress=False)
        alone = PageCopier(prepared.ranks)
        prepared.ranks.workers[0].comm.channel = channel
        prepared = dataclasses.replace(prepared, config=config.replace(kv_offloading_size="1M"))
        made = make_kv_transfer(prepared, engine.scheduler.kv_cache_manager, None)
        assert made is not None and isinstance(made.connector, TieredConnector)
        made.close()
        return alone.pages_per_copy, made.page_copier.pages_per_copy, made._at_once, made.connector.host.capacity

    (one, *first), (other, *second) = played(2, part)
    assert other < one, "the test is of unequal ranks"
    assert first == second and first[:2] == [other, other]
