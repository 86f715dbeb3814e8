"""Which rank has which experts: at first, and by what they had to do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.engine.parallel.eplb.placement import balancedness, rank_loads, rebalanced
from quintet.engine.parallel.eplb.transfer import _send_rounds
from quintet.layers.moe.expert_placement import (
    COPY_COLUMNS,
    ExpertPlacement,
    Placement,
    RankExperts,
    format_expert_ids,
    ranks_of,
)

STRATEGIES = ("linear", "round_robin")


@st.composite
def dealings(draw: st.DrawFn) -> tuple[ExpertPlacement, int, int]:
    """How, experts, ranks."""
    size = draw(st.integers(2, 6))
    experts = draw(st.integers(size, 40))
    copies = draw(st.integers(0, experts * (size - 1)))
    return ExpertPlacement(draw(st.sampled_from(STRATEGIES)), copies), experts, size


def rooms(placement: Placement) -> list[int]:
    return [len(own) for own in placement]


@given(dealings())
def test_every_expert_is_somewhere_and_ranks_keep_as_many_but_for_one(dealt: tuple[ExpertPlacement, int, int]) -> None:
    dealing, experts, size = dealt
    placement = dealing.placement(experts, size)
    assert set().union(*placement) == set(range(experts))
    assert sum(rooms(placement)) == experts + dealing.redundant_experts
    assert max(rooms(placement)) - min(rooms(placement)) <= 1


@pytest.mark.parametrize(
    ("strategy", "copies", "want"),
    [
        ("linear", 0, ((0, 1, 2), (3, 4), (5, 6))),
        ("round_robin", 0, ((0, 3, 6), (1, 4), (2, 5))),
        ("linear", 2, ((0, 1, 2), (3, 4, 5), (6, 0, 1))),
        ("round_robin", 2, ((0, 3, 6), (1, 4, 0), (2, 5, 1))),
    ],
)
def test_experts_lie_as_vllm_lays_them(strategy: str, copies: int, want: Placement) -> None:
    assert ExpertPlacement(strategy, copies).placement(7, 3) == want


def test_a_first_copy_is_on_another_rank_than_its_expert() -> None:
    for strategy in STRATEGIES:
        placement = ExpertPlacement(strategy, 2).placement(8, 2)
        assert sum(map(len, ranks_of(placement, 8))) == 10, (strategy, placement)


@given(dealings())
def test_each_token_is_served_by_one_rank(dealt: tuple[ExpertPlacement, int, int]) -> None:
    dealing, experts, size = dealt
    tables = torch.stack([RankExperts(dealing, experts, rank, size).table() for rank in range(size)])
    assert tables.shape == (size, experts, COPY_COLUMNS if dealing.redundant_experts else 1)
    assert ((tables >= 0).sum(0) == 1).all()
    for rank, own in enumerate(dealing.placement(experts, size)):
        for expert, row in enumerate(tables[rank].tolist()):
            assert all(own[place] == expert for place in row if place >= 0)


@given(dealings(), st.data())
def test_balancing_keeps_rooms_and_makes_nothing_worse(
    dealt: tuple[ExpertPlacement, int, int], data: st.DataObject
) -> None:
    dealing, experts, size = dealt
    now = dealing.placement(experts, size)
    loads = data.draw(st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts))
    found = rebalanced(loads, now)
    assert rooms(found) == rooms(now) and set().union(*found) == set(range(experts))
    assert max(rank_loads(loads, found)) <= max(rank_loads(loads, now))
    assert balancedness(loads, found) >= balancedness(loads, now)
    assert sum(rank_loads(loads, found)) == pytest.approx(sum(loads))
    assert rebalanced(loads, now) == found, "the same on every rank"


@given(dealings(), st.data())
def test_what_moves_comes_from_a_rank_that_has_it(dealt: tuple[ExpertPlacement, int, int], data: st.DataObject) -> None:
    dealing, experts, size = dealt
    now = dealing.placement(experts, size)
    new = rebalanced(data.draw(st.lists(st.integers(0, 99), min_size=experts, max_size=experts)), now)
    sent: list[int] = []
    for each in _send_rounds(now, new):
        for rank, given_ in enumerate(each):
            if given_ is not None:
                expert, place = given_
                assert now[rank][place] == expert
                sent.append(expert)
    lacking = {expert for own, wanted in zip(now, new, strict=True) for expert in wanted if expert not in own}
    assert sorted(sent) == sorted(lacking)
    for own, wanted in zip(now, new, strict=True):
        for place, expert in enumerate(own):
            assert expert not in wanted or wanted.count(expert) > 1 or own.count(expert) > 1 or wanted[place] == expert


def test_the_busiest_expert_gets_the_copy() -> None:
    now = ExpertPlacement("linear", 1).placement(5, 2)
    found = rebalanced([1, 1, 100, 1, 1], now)
    assert all(2 in own for own in found)
    assert balancedness([1, 1, 100, 1, 1], now) < 0.6 < 0.98 < balancedness([1, 1, 100, 1, 1], found)


def test_busy_neighbours_are_parted() -> None:
    loads = [50, 50, 1, 1]
    found = rebalanced(loads, ExpertPlacement().placement(4, 2))
    assert balancedness(loads, found) == 1.0 and [own[0] for own in found] != [0, 1]


def test_what_would_gain_little_stays() -> None:
    now = ((0, 1), (2, 3))
    assert rebalanced([100, 100, 100, 101], now) is now
    assert rebalanced([0, 0, 0, 0], now) is now


def test_too_few_experts_and_too_many_copies_are_refused() -> None:
    with pytest.raises(ValueError, match="3 experts cannot be dealt out to 4 ranks.*lower tensor_parallel_size"):
        ExpertPlacement().placement(3, 4)
    with pytest.raises(ValueError, match="num_redundant_experts=5: .* are 4 copies at most; lower it"):
        ExpertPlacement(redundant_experts=5).placement(4, 2)


def test_experts_are_said_in_runs() -> None:
    assert format_expert_ids([3, 0, 1, 2, 5, 7, 8]) == "0-3, 5, 7, 8"
