"""Tests of the choice of tests: grids and shares of the sweep."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import cpu_times, selection

pytest_plugins = ["pytester"]

GRID = """
import pytest

@pytest.mark.grid
@pytest.mark.parametrize("b", "uvwxyz")
@pytest.mark.parametrize("a", range(4))
def test_covered(a, b): pass

@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("a", range(20))
def test_few(a): pass

@pytest.mark.sweep
@pytest.mark.timeout(301)
def test_hour(): pass

@pytest.mark.parametrize("a", range(20))
def test_long(a): pass
"""
CONFTEST = """
import pytest
from tests.helpers import selection

pytest_addoption = selection.add_options

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items): selection.choose(config, items)
"""


@pytest.fixture
def collected(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """The names of the tests that a run with these arguments collects."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GRID)
    pytester.makeini("[pytest]\nmarkers =\n  grid: \n  sweep: \n  slow: \n  long: \n  timeout: \n")

    def names(*args: str) -> set[str]:
        run = pytester.runpytest("--collect-only", "-q", "-p", "no:cacheprovider", *args)
        assert run.ret in (0, 5), run.outlines
        return {line.partition("::")[2] for line in run.outlines if "::" in line}

    return names


def test_a_cover_has_every_element_once_at_least_and_few_cases() -> None:
    cases = [(("a", a), ("b", b)) for a in range(4) for b in range(9)]
    kept = [cases[number] for number in selection.cover(cases)]
    assert {element for case in kept for element in case} == {element for case in cases for element in case}
    assert len(kept) == 9
    assert selection.cover(cases) == selection.cover(cases)


def test_a_grid_keeps_a_cover_and_the_sweep_has_the_rest(collected: Callable[..., set[str]]) -> None:
    kept, swept = collected("-m", "not sweep"), collected("-m", "sweep")
    covered = [name for name in kept if name.startswith("test_covered")]
    assert (
        len(covered) == 6
        and {name[13] for name in covered} == set("0123")
        and {name[15] for name in covered} == set("uvwxyz")
    )
    assert {name for name in kept if name.startswith("test_few")} == {"test_few[0]", "test_few[10]"}
    assert not kept & swept and len(kept | swept) == 24 + 20 + 1 + 20


def test_shares_together_have_all_of_the_sweep_but_what_takes_an_hour(collected: Callable[..., set[str]]) -> None:
    kept, swept = collected("-m", "not sweep"), collected("-m", "sweep")
    shares = [collected("--share", f"sweep={number}/3") for number in (1, 2, 3)]
    assert all(kept <= share for share in shares)
    parts = [share - kept for share in shares]
    assert all(parts) and sum(len(part) for part in parts) == len(set.union(*parts))
    assert set.union(*parts) == swept - {"test_hour"}


def test_a_share_of_the_listed_tests_leaves_the_others(
    collected: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(selection, "LONG_TESTS", tmp_path / "long_tests.txt")
    name = "test_shares.py::test_long"
    (tmp_path / "long_tests.txt").write_text(
        f"test_a_share_of_the_listed_tests_leaves_the_others.py::test_long\n{name}\n"
    )
    kept = collected("-m", "not sweep")
    shares = [collected("-m", "not sweep", "--share", f"long={number}/4") for number in (1, 2, 3, 4)]
    others = {each for each in kept if not each.startswith("test_long")}
    assert len(kept - others) == 20 and all(others <= share for share in shares)
    parts = [share - others for share in shares]
    assert all(parts) and sum(len(part) for part in parts) == 20 and set.union(*parts) == kept - others


def test_the_list_names_tests_that_are_there() -> None:
    for line in selection.LONG_TESTS.read_text(encoding="utf-8").split():
        path, *_, name = line.split("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8"), line


def test_tests_of_which_all_cases_take_half_a_second_are_long() -> None:
    lines = [
        json.dumps(each)
        for each in (
            ["a.py::b[1]", "", 0.3],
            ["a.py::b[2]", "", 0.3],
            ["a.py::c", "", 0.4],
            ["a.py::d", "slow", 9.0],
            ["tests/rules/e.py::f", "", 9.0],
        )
    ]
    assert cpu_times.long_tests(lines) == ["a.py::b"]


@pytest.mark.parametrize("share", ["sweep=0/3", "long=4/3", "sweep=3", "slow=a/b", "sweep=/", "3/10", "quick=1/2"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="is no share: give MARK=NUMBER/COUNT"):
        selection.outside([], [share])
