"""Choice of the tests of a run: the cases of a grid that stay in every run, and shares of those that take long."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

SHARED = ("sweep", "slow", "long")  # marks of which a run may take a share; of a test with several, the first counts
LONG_TESTS = Path(__file__).resolve().parents[1] / "long_tests.txt"
LONGEST = 300.0  # seconds that a test of a share may ask for; longer ones run in `make test-sweep` alone


def add_options(parser: pytest.Parser) -> None:
    help = "of the tests with this mark (sweep, slow, long) a share alone, e.g. sweep=3/10; may be repeated"
    parser.addoption("--share", metavar="MARK=NUMBER/COUNT", action="append", default=[], help=help)


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests, leave those out that no share has, and put the longest first: no worker waits for one at the
    end."""
    spread(items)
    mark_long(items)
    if shares := config.getoption("--share"):
        left = outside(items, shares)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("slow", "sweep")))


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


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of LONG_TESTS, which `python -m tests.helpers.cpu_times` writes, as long."""
    names = set(LONG_TESTS.read_text(encoding="utf-8").split())
    for item in items:
        if item.nodeid.partition("[")[0] in names:
            item.add_marker(pytest.mark.long)


def outside(items: Iterable[pytest.Item], shares: Sequence[str]) -> set[pytest.Item]:
    """The tests that shares do not have; "sweep=3/10" is the third tenth of the tests marked sweep.

    The checksum of a test's name puts it into a part. No share of the sweep has a test whose limit is above LONGEST.
    """
    wanted: dict[str, tuple[int, int]] = {}
    for share in shares:
        mark, _, part = share.partition("=")
        number, _, count = part.partition("/")
        if mark not in SHARED or not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise pytest.UsageError(
                f"--share={share!r} is no share: give MARK=NUMBER/COUNT, e.g. sweep=3/10; marks: {', '.join(SHARED)}"
            )
        wanted[mark] = int(number), int(count)
    return {item for item in items if (mark := _mark(item)) in wanted and not _has(item, mark, *wanted[mark])}


def _mark(item: pytest.Item) -> str:
    return next((mark for mark in SHARED if item.get_closest_marker(mark)), "")


def _has(item: pytest.Item, mark: str, number: int, count: int) -> bool:
    limit = item.get_closest_marker("timeout")
    if mark == "sweep" and limit is not None and float(limit.args[0]) > LONGEST:
        return False
    return zlib.crc32(item.nodeid.encode()) % count == number - 1
