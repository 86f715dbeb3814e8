"""Stat loggers of installed packages: what they receive, and that one which fails ends alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quintet.engine.observability.stats import SchedulerStats, SpecDecodeStats, Stats, StepStats
from quintet.server.metrics import stat_loggers
from quintet.server.metrics.stat_loggers import StatLoggerBase, StatLoggers, load_stat_loggers
from tests.server.fakes import FakeBackend


class Kept(StatLoggerBase):
    """Keeps all that it is called with."""

    calls: list[tuple[Any, ...]] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.calls.append((self.engine_index, engine_idx, scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.calls.append(("initialized", self.vllm_config.model))

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        self.calls.append(("sleep", is_awake, level))


class Failing(Kept):
    """Fails at its first record."""

    def record(self, *_: Any, **__: Any) -> None:
        raise OSError("no disk")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeBackend]:
    """Returns a backend of engines with the given stats."""
    Kept.calls = []
    fake = FakeBackend()
    info = fake.model_info

    def having(*stats: Stats) -> FakeBackend:
        monkeypatch.setattr(FakeBackend, "engines", lambda self: [(info, each) for each in stats], raising=False)
        return fake

    return having


def stats(steps: int, asleep: int = 0) -> Stats:
    return Stats(
        SchedulerStats(3, 2, 0.5, num_preemptions=steps, prefix_queries=10 * steps, prefix_hits=4 * steps),
        StepStats(num_steps=steps, num_prompt_tokens=6 * steps, num_generation_tokens=2 * steps),
        SpecDecodeStats(steps, 3 * steps, 2 * steps, (steps,) * min(steps, 2)),
        asleep=asleep,
    )


def test_counts_are_those_since_the_last_record(backend: Callable[..., FakeBackend]) -> None:
    loggers = StatLoggers([("kept", Kept)])
    loggers.record(backend(stats(1), stats(5)))
    loggers.record(backend(stats(4), stats(5, asleep=1)))
    loggers.record(backend(stats(2), stats(5, asleep=1)))  # the first engine began anew
    model = FakeBackend().model_info.model
    assert Kept.calls[:2] == [("initialized", model), ("initialized", model)], "one for each engine"
    records = [each for each in Kept.calls[2:] if each[0] != "sleep"]
    assert [each[:2] for each in records] == [(0, 0), (1, 1)] * 3
    (_, _, first, work), (_, _, other, rest) = records[2:4]
    assert (first.num_running_reqs, first.num_waiting_reqs, first.kv_cache_usage) == (3, 2, 0.5)
    assert (first.prefix_cache_stats.queries, first.prefix_cache_stats.hits) == (30, 12)
    assert first.spec_decoding_stats == SpecDecodeStats(3, 9, 6, (3, 4))
    assert (work.num_steps, work.num_prompt_tokens, work.num_generation_tokens, work.num_preempted_reqs) == (
        3,
        18,
        6,
        3,
    )
    assert (rest.num_steps, other.prefix_cache_stats.queries) == (0, 0)
    assert [each for each in Kept.calls if each[0] == "sleep"] == [("sleep", 0, 1)]
    assert records[4][3].num_steps == 2, "counts of an engine that began anew are its own"


async def test_one_that_fails_is_called_no_more(
    backend: Callable[..., FakeBackend], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stat_loggers, "SECONDS", 0.0)
    loggers = StatLoggers([("failing", Failing), ("unmade", lambda info, engine: None.none)])  # type: ignore[attr-defined]
    await loggers.run(backend(stats(1)))  # returns, for none is left
    assert "the stat logger failing failed" in caplog.text and "the stat logger unmade failed" in caplog.text


async def test_without_any_nothing_runs(backend: Callable[..., FakeBackend]) -> None:
    running = asyncio.create_task(StatLoggers([]).run(backend(stats(1))))
    await asyncio.sleep(0)
    assert running.done() and running.exception() is None


def test_packages_name_subclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = Kept

    class Point:
        name, value = "kept", "package:Kept"

        def load(self) -> Any:
            if made is None:
                raise ImportError("no package")
            return made

    monkeypatch.setattr(stat_loggers, "entry_points", lambda group: [Point()])
    assert load_stat_loggers() == [("kept", Kept)]
    made = Stats
    with pytest.raises(ValueError, match="'kept' .package:Kept. is no subclass of StatLoggerBase"):
        load_stat_loggers()
    made = None
    with pytest.raises(ValueError, match="'kept' cannot be imported: ImportError: no package; mend the package"):
        load_stat_loggers()
