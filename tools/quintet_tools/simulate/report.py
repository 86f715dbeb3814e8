"""Figures of a played trace, under the names that `quintet bench serve` has for the same."""

from collections.abc import Mapping
from typing import Any

from quintet.clients.latency import LoadResult, RequestOutcome, percentiles
from quintet.engine.observability.stats import total
from quintet_tools.simulate.fleet import Played

_OURS = ("chunks", "client_cpu_us_per_chunk", "client_cpu_share", "token_counts", "failures")  # what a client adds


def figures_of(played: Played, goodput: Mapping[str, float]) -> dict[str, Any]:
    """`goodput` holds limits in seconds by metric: ttft, tpot, e2el."""
    outcomes = [
        RequestOutcome(each.entry.arrival, each.times, each.entry.input_length, len(each.times)) for each in played.told
    ]
    figures = LoadResult(outcomes, played.seconds, 0.0).figures(goodput)
    figures = {name: value for name, value in figures.items() if name not in _OURS}
    stats, used = total(played.stats), [worked / played.seconds for worked in played.worked]
    waited = percentiles([(each.scheduled - each.entry.arrival) * 1e3 for each in played.told], (50, 90, 99))
    queues = stats.scheduler
    if goodput:
        figures["goodput_share"] = sum(each.meets_goals(goodput) for each in outcomes) / len(outcomes)
    return {
        **figures,
        **{f"{'median' if share == 'p50' else share}_queue_ms": value for share, value in waited.items()},
        "preemptions": queues.num_preemptions,
        "prefix_cache_hit_rate": queues.prefix_hits / queues.prefix_queries if queues.prefix_queries else 0.0,
        "steps": stats.steps.num_steps,
        "mean_utilization": sum(used) / len(used),
        "min_utilization": min(used),
        "max_utilization": max(used),
        "utilization": [round(each, 4) for each in used],
        "requests_by_engine": _by_engine(played),
    }


def _by_engine(played: Played) -> list[int]:
    counts = [0] * len(played.worked)
    for each in played.told:
        counts[each.engine] += 1
    return counts
