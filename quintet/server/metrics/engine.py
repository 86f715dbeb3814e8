"""What the engine tells of itself, as rows of the scrape."""

from collections.abc import Iterator

import msgspec

from quintet.engine.metrics import COUNTERS, GAUGES
from quintet.engine.series import Row
from quintet.engine.stats import Stats
from quintet.server.backend import Backend, Served

# metric -> the field of Engine.Stats that it shows
_FIELDS = {**GAUGES, **{f"{name}_total": field for name, field in COUNTERS.items()}}
_WAITING = "vllm:num_requests_waiting_by_reason"
_SLEEP = ("awake", "weights_offloaded", "discard_all")  # by level


def engine_rows(backend: Backend) -> list[Row]:
    """At most as old as the engine's latest sign of life. While the model is loading there is little to tell."""
    up = Row("quintet:engine_up", (), [float(backend.trouble() is None)])
    rows = [
        msgspec.structs.replace(row, engine=number)
        for number, (served, stats) in enumerate(backend.engines())
        for row in (*_told(stats, served), *_labelled(stats, served))
    ]
    return [*rows, up]


def _told(stats: Stats, served: Served) -> list[Row]:
    values = {name: getattr(stats, field) for name, field in _FIELDS.items()}
    values["vllm:prompt_tokens_total"] = stats.num_prompt_tokens + stats.cached_tokens
    values["quintet:kv_pages_used"] = round(stats.kv_usage * served.num_pages)
    values["quintet:kv_pages_total"] = served.num_pages
    values["quintet:step_tokens"] = stats.step_tokens if stats.num_running else 0  # else it is of long ago
    return [Row(name, (), [value]) for name, value in values.items()]


def _labelled(stats: Stats, served: Served) -> Iterator[Row]:
    """Metrics with labels of their own, and the histogram of steps."""
    deferred = min(stats.num_deferred, stats.num_waiting)  # counted by a thread that does not stop the engine
    yield Row(_WAITING, ("capacity",), [stats.num_waiting - deferred])
    yield Row(_WAITING, ("deferred",), [deferred])
    for level, state in enumerate(_SLEEP):
        yield Row("vllm:engine_sleep_state", (state,), [stats.asleep == level])
    yield Row("vllm:prompt_tokens_by_source_total", ("local_compute",), [stats.num_prompt_tokens])
    yield Row("vllm:prompt_tokens_by_source_total", ("local_cache_hit",), [stats.prefix_hits])
    yield Row("vllm:prompt_tokens_by_source_total", ("external_kv_transfer",), [stats.external_hits])
    for place, count in enumerate(stats.accepted_at):
        yield Row("vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),), [count])
    yield Row("vllm:iteration_tokens_total", (), [*stats.step_sizes, stats.num_tokens])
    yield Row("vllm:cache_config_info", _cache(served), [1])


def _cache(served: Served) -> tuple[str, ...]:
    """In the order of CACHE_LABELS, written as vLLM writes them."""
    facts = (served.page_size, served.cache_dtype, served.prefix_caching, served.kv_tokens, served.num_pages)
    return tuple(map(str, facts))
