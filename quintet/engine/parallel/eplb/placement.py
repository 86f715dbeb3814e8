"""Placement of experts by their load: copies of the busiest, and ranks with about the same load."""

from collections.abc import Sequence

from quintet.layers.moe.expert_placement import Placement, ranks_of

MIN_GAIN = 0.02  # of the busiest rank's load: for a smaller gain, experts stay


def rebalanced(loads: Sequence[int], now: Placement) -> Placement:
    """Returns a placement with as many places on each rank, for these expert loads; `now` itself if none is worth it.

    Greedy: one more copy for the expert with the highest load per copy; then, the largest first, each copy to the rank
    with the least load so far and a free place. An expert that stays on a rank stays in its place.
    """
    size, rooms = len(now), [len(own) for own in now]
    copies = _num_copies(loads, sum(rooms) - len(loads), size)
    each = [(loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)]
    sums, given = [0.0] * size, [list[int]() for _ in range(size)]
    for load, expert in sorted(each, key=lambda one: (-one[0], one[1])):
        free = [rank for rank in range(size) if len(given[rank]) < rooms[rank]]
        # if all free ranks have a copy already, this copy is of no use on any of them
        rank = min(free, key=lambda r: (expert in given[r], sums[r], expert not in now[r], r))
        given[rank].append(expert)
        sums[rank] += load
    found = tuple(_keep_in_place(own, wanted) for own, wanted in zip(now, given, strict=True))
    gained = max(rank_loads(loads, now)) - max(rank_loads(loads, found))
    return found if gained > MIN_GAIN * max(rank_loads(loads, now)) else now


def rank_loads(loads: Sequence[int], placement: Placement) -> list[float]:
    """Returns the load of each rank where the copies of an expert share its load evenly."""
    sums = [0.0] * len(placement)
    for load, copies in zip(loads, ranks_of(placement, len(loads)), strict=True):
        for rank, _ in copies:
            sums[rank] += load / len(copies)
    return sums


def balancedness(loads: Sequence[int], placement: Placement) -> float:
    """Returns the mean over the maximum of the ranks' loads (balancedness): 1 if all have the same, 1 / N if one has
    all."""
    sums = rank_loads(loads, placement)
    return sum(sums) / len(sums) / max(sums) if any(sums) else 1.0


def _num_copies(loads: Sequence[int], spare: int, size: int) -> list[int]:
    """Returns the number of copies of each expert, at most one on a rank."""
    copies = [1] * len(loads)
    for _ in range(spare):
        free = [expert for expert, count in enumerate(copies) if count < size]
        copies[max(free, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    return copies


def _keep_in_place(own: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Returns `wanted` in an order that moves as few experts as possible."""
    left, found = list(wanted), list[int | None]()
    for expert in own:
        stays = expert in left
        found.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return tuple(left.pop(0) if expert is None else expert for expert in found)
