"""Stat loggers of installed packages: code of yours that receives the engines' stats every second, as vLLM's.

A package names a subclass of StatLoggerBase in the entry-point group `quintet.stat_logger_plugins`. All that are
installed are used, by the first API process alone.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quintet.common.plugins import STAT_LOGGERS, entry_points
from quintet.engine.observability.stats import SpecDecodeStats, Stats
from quintet.engine.processes.model_info import ModelInfo
from quintet.server.backend import Backend

SECONDS = 1.0  # between two records; the engines' stats are as old at most

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixCacheStats:
    """Prompt tokens that were looked up in the prefix cache since the last record, and those found there."""

    queries: int
    hits: int


@dataclass(frozen=True)
class SchedulerStats:
    """State of an engine's scheduler, under vLLM's names; counts are since the last record."""

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float  # share of the pages that requests hold, 0 to 1
    prefix_cache_stats: PrefixCacheStats
    spec_decoding_stats: SpecDecodeStats | None  # its counts; None: nothing was guessed


@dataclass(frozen=True)
class IterationStats:
    """Work of an engine since the last record, under vLLM's names."""

    num_steps: int
    num_prompt_tokens: int  # computed, so without those found in the prefix cache
    num_generation_tokens: int
    num_preempted_reqs: int


class StatLoggerBase:
    """One for each engine (`data_parallel_size` of them). An exception of record() or log() ends the logger, and
    nothing else."""

    def __init__(self, vllm_config: ModelInfo, engine_index: int = 0) -> None:
        """`vllm_config`: what is known of the model and its engine, once that is loaded."""
        self.vllm_config, self.engine_index = vllm_config, engine_index

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Receives the stats, every second. It is called in the server's event loop and must not wait."""
        raise NotImplementedError

    def log_engine_initialized(self) -> None:
        """Called once, when the model is loaded."""

    def log(self) -> None:
        """Called after each record()."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Called where the engine has fallen asleep or woken."""


Factory = Callable[[ModelInfo, int], StatLoggerBase]


def load_stat_loggers() -> list[tuple[str, Factory]]:
    """Returns the installed stat loggers' names and classes. ValueError names one that cannot be used."""
    loaded: list[tuple[str, Factory]] = []
    for point in sorted(entry_points(STAT_LOGGERS), key=lambda each: each.name):
        try:
            kind = point.load()
        except Exception as error:  # a package's own code
            raise _failure(point.name, "be imported", error) from error
        if not isinstance(kind, type) or not issubclass(kind, StatLoggerBase):
            raise ValueError(
                f"the stat logger {point.name!r} ({point.value}) is no subclass of StatLoggerBase "
                "(quintet.server.metrics.stat_loggers); mend the package that brings it, or uninstall it"
            )
        loaded.append((point.name, kind))
    return loaded


class _Running:
    """A logger of one engine, and the stats that it has received."""

    def __init__(self, name: str, factory: Factory, info: ModelInfo, engine: int) -> None:
        self.name, self.engine = name, engine
        self._logger, self._last = factory(info, engine), Stats()
        self._logger.log_engine_initialized()

    def record(self, stats: Stats) -> bool:
        """Returns True, where nothing fails."""
        last, self._last = self._last, stats
        if (
            last.scheduler.prefix_queries > stats.scheduler.prefix_queries
            or last.steps.num_steps > stats.steps.num_steps
        ):
            last = Stats()  # another engine process took its place
        self._logger.record(_scheduler_stats(stats, last), _iteration_stats(stats, last), None, self.engine)
        if stats.asleep != last.asleep:
            self._logger.record_sleep_state(int(not stats.asleep), stats.asleep)
        self._logger.log()
        return True


class StatLoggers:
    """All stat loggers of a server."""

    def __init__(self, factories: Sequence[tuple[str, Factory]]) -> None:
        self._factories = factories
        self._running: list[_Running] | None = None  # made once all engines are loaded

    async def run(self, backend: Backend) -> None:
        """Records until it is cancelled; returns where there is no logger (any more)."""
        while self._factories and self._running != []:
            await asyncio.sleep(SECONDS)
            self.record(backend)

    def record(self, backend: Backend) -> None:
        """Has each logger record the latest stats of its engine."""
        if backend.unavailable_reason() is not None:
            return
        engines = backend.engines()
        if self._running is None:
            self._running = [
                made
                for name, factory in self._factories
                for engine, (info, _) in enumerate(engines)
                if (made := self._try(name, partial(_Running, name, factory, info, engine))) is not None
            ]
        for each in list(self._running):
            if (
                each.engine < len(engines)
                and self._try(each.name, partial(each.record, engines[each.engine][1])) is None
            ):
                self._running.remove(each)

    @staticmethod
    def _try(name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception:  # a package's own code
            logger.exception("the stat logger %s failed, and is called no more", name)
            return None


def _scheduler_stats(stats: Stats, last: Stats) -> SchedulerStats:
    new, old, guesses = stats.scheduler, last.scheduler, stats.spec_decode
    return SchedulerStats(
        num_running_reqs=new.num_running,
        num_waiting_reqs=new.num_waiting,
        kv_cache_usage=new.kv_usage,
        prefix_cache_stats=PrefixCacheStats(new.prefix_queries - old.prefix_queries, new.prefix_hits - old.prefix_hits),
        spec_decoding_stats=_guesses(guesses, last.spec_decode) if guesses.num_drafts else None,
    )


def _guesses(new: SpecDecodeStats, old: SpecDecodeStats) -> SpecDecodeStats:
    before = (*old.accepted_at, *(0,) * len(new.accepted_at))
    return SpecDecodeStats(
        new.num_drafts - old.num_drafts,
        new.num_draft_tokens - old.num_draft_tokens,
        new.num_accepted_tokens - old.num_accepted_tokens,
        tuple(count - before[place] for place, count in enumerate(new.accepted_at)),
        new.num_disabled,
        new.disabled_reason,
    )


def _iteration_stats(stats: Stats, last: Stats) -> IterationStats:
    new, old = stats.steps, last.steps
    return IterationStats(
        num_steps=new.num_steps - old.num_steps,
        num_prompt_tokens=new.num_prompt_tokens - old.num_prompt_tokens,
        num_generation_tokens=new.num_generation_tokens - old.num_generation_tokens,
        num_preempted_reqs=stats.scheduler.num_preemptions - last.scheduler.num_preemptions,
    )


def _failure(name: str, what: str, error: Exception) -> ValueError:
    message = " ".join(str(error).split())
    return ValueError(
        f"the stat logger {name!r} cannot {what}: {type(error).__name__}: {message}; mend the package that brings it, "
        "or uninstall it"
    )
