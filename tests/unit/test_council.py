"""Ranks agree on pages that come to each at a moment of its own: each test plays all ranks, a thread for each."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quintet.engine.elsewhere.connector import Arrived, Load
from quintet.engine.elsewhere.council import Council
from quintet.engine.elsewhere.joint import JointLoad
from quintet.engine.elsewhere.transfer import Refused
from quintet.platforms.interface import Channel

WORDS = 4


class Table(Channel):
    """Where threads exchange notes, of 1000 bytes at most."""

    def __init__(self, rank: int, notes: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._notes, self._barrier = rank, notes, barrier
        self.exchanges = 0

    def exchange(self, note: bytes) -> list[bytes]:
        assert len(note) <= 1000
        self.exchanges += 1
        self._notes[self._rank] = note
        self._barrier.wait(30)
        found = list(self._notes)
        self._barrier.wait(30)
        return found

    def tell(self, letter: bytes) -> None:
        raise AssertionError

    def hear(self) -> bytes:
        raise AssertionError

    def stop(self, why: str) -> None:
        raise AssertionError

    stopped = ""


class Shuffled(Load):
    """Pages that come in an order of this rank's own; some do not."""

    def __init__(self, seed: int, count: int, lost: Sequence[int] = (), stuck: bool = False) -> None:
        self._rng, self._left, self._lost, self._stuck = random.Random(seed), list(range(count)), set(lost), stuck
        self._rng.shuffle(self._left)
        self.canceled = False

    @property
    def done(self) -> bool:
        return not self._left

    def take(self, most: int) -> Arrived:
        count = 0 if self._stuck else self._rng.randint(0, min(most, len(self._left)))
        taken, self._left = self._left[:count], self._left[count:]
        came = [at for at in taken if at not in self._lost]
        rows = np.repeat(np.array(came, np.int32)[:, None], WORDS, 1)
        return Arrived(came, rows, {at: "it is damaged" for at in taken if at in self._lost})

    def cancel(self) -> None:
        self.canceled, self._left = True, []


def played(size: int, part: Any) -> list[Any]:
    """What each rank's part gives, told its rank and its channel."""
    notes, barrier = [b""] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        waiting = [pool.submit(part, rank, Table(rank, notes, barrier)) for rank in range(size)]
        return [each.result(60) for each in waiting]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_is_given_the_same_pages_at_the_same_meeting(size: int) -> None:
    lost = {0: [3], 1: [3, 700], 2: [1]}

    def part(rank: int, channel: Table) -> Any:
        council, turns = Council(channel, 60.0), list[tuple[list[int], dict[int, str]]]()
        load = council.agreed(Shuffled(rank, 5000, lost[rank]), 5000)
        while council.due:
            council.meet(900)
            came = load.take(500)
            assert came.rows.shape == (len(came.places), WORDS)
            assert [row[0] for row in came.rows.tolist()] == came.places, "each row is of its own place"
            turns.append((came.places, came.failed))
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
        council, request, other = Council(channel, 60.0), object(), object()
        council.look_up(request, lambda: there[rank])  # type: ignore[arg-type]
        council.look_up(other, lambda: there[rank])  # type: ignore[arg-type]
        council.forget(other)  # type: ignore[arg-type]
        assert council.due
        found = council.meet(8)
        assert not council.due
        return list(found.values())

    assert played(2, part) == [[[True, False, False, False]]] * 2


def test_a_rank_to_which_nothing_comes_gives_up_for_all() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, failed = Council(channel, 0.01 if rank else 60.0), dict[int, str]()
        inner = Shuffled(rank, 4, stuck=rank == 1)
        load = council.agreed(inner, 4)
        while council.due:
            council.meet(8)
            came = load.take(8)
            assert not came.places
            failed.update(came.failed)
        return failed

    said = played(2, part)
    assert said[0] == said[1] == dict.fromkeys(range(4), "rank 1 of 2: nothing more came within 0.01 s")


def test_a_load_that_nobody_wants_any_more_is_not_talked_of() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, inner = Council(channel, 60.0), Shuffled(rank, 4)
        council.agreed(inner, 4).cancel()
        return inner.canceled and not council.due

    assert played(2, part) == [True, True]


def test_a_load_of_which_a_part_will_not_come_gives_the_rest() -> None:
    def part(rank: int, channel: Table) -> Any:
        council, came, failed = Council(channel, 60.0), list[int](), dict[int, str]()
        agreed = council.agreed(Shuffled(rank, 6), 6)
        load = JointLoad([(agreed, [0, 2, 4, 6, 8, 10]), (Refused(2, "other ranks"), [1, 3])])
        while not load.done:
            if council.due:
                council.meet(3)
            arrived = load.take(3)
            came += arrived.places
            failed.update(arrived.failed)
        return sorted(came), failed

    assert played(2, part) == [([0, 2, 4, 6, 8, 10], {1: "other ranks", 3: "other ranks"})] * 2
