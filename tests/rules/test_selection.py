"""Tests of the choice of tests: grids and shares of the sweep."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import selection

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
def test_long(): pass
"""
CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8")


@pytest.fixture
def collected(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """The names of the tests that a run with these arguments collects."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GRID)
    pytester.makeini(
        "[pytest]\nmarkers =\n  grid: \n  sweep: \n  slow: \n  timeout: \n"
        "asyncio_default_fixture_loop_scope = function\n"
    )

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
    assert not kept & swept and len(kept | swept) == 24 + 20 + 1


def test_shares_together_have_all_of_the_sweep_but_what_takes_long(collected: Callable[..., set[str]]) -> None:
    kept, swept = collected("-m", "not sweep"), collected("-m", "sweep")
    shares = [collected(f"--sweep-share={number}/3") for number in (1, 2, 3)]
    assert all(kept <= share for share in shares)
    parts = [share - kept for share in shares]
    assert all(parts) and sum(len(part) for part in parts) == len(set.union(*parts))
    assert set.union(*parts) == swept - {"test_long"}


@pytest.mark.parametrize("share", ["0/3", "4/3", "3", "a/b", "/"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="is no share: give NUMBER/COUNT"):
        selection.outside([], share)
