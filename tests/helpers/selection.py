"""Choice of the tests of a run: the cases of a grid that stay in every run, and a share of the sweep."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest

LONGEST = 300.0  # seconds that a test of a share may ask for; longer ones run in `make test-sweep` alone


def spread(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of each grid as sweep, but for a few that cover every value of every parameter.

    `grid(cases=8)` keeps 8 of these at most, at equal distances in the list of cases.
    """
    grids: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        apart = item.get_closest_marker("slow") or item.get_closest_marker("sweep")
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid") and not apart:
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        kept = sorted(cover([_values(case) for case in cases]))
        limit = cases[0].get_closest_marker("grid").kwargs.get("cases", len(kept))  # type: ignore[union-attr]
        if len(kept) > limit:
            kept = [kept[place * len(kept) // limit] for place in range(limit)]
        for number in set(range(len(cases))).difference(kept):
            cases[number].add_marker(pytest.mark.sweep)


def _values(case: pytest.Function) -> tuple[object, ...]:
    return tuple((name, repr(value)) for name, value in case.callspec.params.items())


def cover(cases: Sequence[tuple[object, ...]]) -> set[int]:
    """The numbers of a few cases in which each element of any case occurs: a greedy choice, the same each time."""
    missing = {element for case in cases for element in case}
    kept: set[int] = set()
    uses: Counter[object] = Counter()  # of two that add as much, the one whose values occur least
    while missing:
        best = max(
            range(len(cases)),
            key=lambda n: (len(missing.intersection(cases[n])), -sum(uses[each] for each in cases[n]), -n),
        )
        kept.add(best)
        uses.update(cases[best])
        missing.difference_update(cases[best])
    return kept


def outside(items: Iterable[pytest.Item], share: str) -> set[pytest.Item]:
    """The tests of the sweep that a share ("3/10": the third of ten) does not have.

    A share is a tenth by a checksum of the test's name. No share has a test whose time limit is above LONGEST.
    """
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--sweep-share={share!r} is no share: give NUMBER/COUNT, e.g. 3/10")
    left = set()
    for item in items:
        if item.get_closest_marker("sweep"):
            limit = item.get_closest_marker("timeout")
            long = limit is not None and float(limit.args[0]) > LONGEST
            if long or zlib.crc32(item.nodeid.encode()) % int(count) != int(number) - 1:
                left.add(item)
    return left
