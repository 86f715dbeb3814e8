"""Where experts go by what they had to do: copies of the busiest, and ranks that have as much to do as each other."""

from collections.abc import Sequence

from quintet.layers.dealing import Placement, holders

WORTH = 0.02  # of the busiest rank's load: where less would be gained, experts stay


def balanced(loads: Sequence[int], now: Placement) -> Placement:
    """A placement with as many places on each rank, for experts of these loads; `now` itself if none is worth it.

    Greedy: a copy more for whichever has most to do for each of its copies; then, the largest first, each copy to the
    rank that has least to do so far and a place left. An expert that stays on a rank stays in its place.
    """
    size, rooms = len(now), [len(own) for own in now]
    copies = _copies(loads, sum(rooms) - len(loads), size)
    each = [(loads[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)]
    sums, given = [0.0] * size, [list[int]() for _ in range(size)]
    for load, expert in sorted(each, key=lambda one: (-one[0], one[1])):
        free = [rank for rank in range(size) if len(given[rank]) < rooms[rank]]
        # where all that are free have a copy already, this one is of no use, and nor is any other
        rank = min(free, key=lambda r: (expert in given[r], sums[r], expert not in now[r], r))
        given[rank].append(expert)
        sums[rank] += load
    found = tuple(_in_place(own, wanted) for own, wanted in zip(now, given, strict=True))
    gained = max(rank_loads(loads, now)) - max(rank_loads(loads, found))
    return found if gained > WORTH * max(rank_loads(loads, now)) else now


def rank_loads(loads: Sequence[int], placement: Placement) -> list[float]:
    """What each rank has to do where the copies of an expert share its load evenly."""
    sums = [0.0] * len(placement)
    for load, copies in zip(loads, holders(placement, len(loads)), strict=True):
        for rank, _ in copies:
            sums[rank] += load / len(copies)
    return sums


def evenness(loads: Sequence[int], placement: Placement) -> float:
    """The mean over the most of the ranks' loads (balancedness): 1 if all have the same, 1 / N if one has all."""
    sums = rank_loads(loads, placement)
    return sum(sums) / len(sums) / max(sums) if any(sums) else 1.0


def _copies(loads: Sequence[int], spare: int, size: int) -> list[int]:
    """Of each expert, one on a rank at most."""
    copies = [1] * len(loads)
    for _ in range(spare):
        free = [expert for expert, count in enumerate(copies) if count < size]
        copies[max(free, key=lambda expert: (loads[expert] / copies[expert], -expert))] += 1
    return copies


def _in_place(own: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """`wanted` in an order that moves as few as possible."""
    left, found = list(wanted), list[int | None]()
    for expert in own:
        stays = expert in left
        found.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return tuple(left.pop(0) if expert is None else expert for expert in found)
