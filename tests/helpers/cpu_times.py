"""Processor time of tests, and the list of those that take long.

make test-all ARGS='-m "not sweep" --cpu-times build/cpu-times'
python -m tests.helpers.cpu_times build/cpu-times
"""

import json
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.selection import LONG_TESTS

LONG = 0.5  # seconds of processor time, of all cases of a test that `make test` would run
ALWAYS = "tests/rules/"  # each change may break these, and no test beside them would see it


class CpuTimes:
    """Writes a line for each test: its name, its mark, the seconds that this process and its children took for it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.jsonl"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _cpu_seconds()
        result = yield
        mark = next((name for name in ("sweep", "slow") if item.get_closest_marker(name)), "")
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, mark, round(_cpu_seconds() - before, 3)]) + "\n")
        return result


def _cpu_seconds() -> float:
    """Of this process, and of children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def long_tests(lines: Iterable[str]) -> list[str]:
    """Names, without their cases, of the unmarked tests whose cases take more than LONG together, but ALWAYS."""
    seconds: dict[str, float] = defaultdict(float)
    for nodeid, mark, spent in map(json.loads, lines):
        if not mark and not nodeid.startswith(ALWAYS):
            seconds[nodeid.partition("[")[0]] += spent
    return sorted(name for name, spent in seconds.items() if spent > LONG)


if __name__ == "__main__":
    found = long_tests(line for path in Path(sys.argv[1]).glob("*.jsonl") for line in path.open(encoding="utf-8"))
    LONG_TESTS.write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
    print(f"{LONG_TESTS}: {len(found)} tests")
