"""Converts the engine's stats to rows of a scrape."""

import time
from collections.abc import Iterator
from operator import attrgetter

import msgspec

from quintet.common.metric_types import MetricSample
from quintet.engine.observability.metrics import COUNTERS, GAUGES
from quintet.engine.observability.stats import Stats
from quintet.engine.processes.model_info import ModelInfo
from quintet.server.backend import Backend

# metric -> its number in Stats
_PATHS = {**GAUGES, **{f"{name}_total": path for name, path in COUNTERS.items()}}
_NUMBERS = {name: attrgetter(path) for name, path in _PATHS.items()}
_WAITING = "vllm:num_requests_waiting_by_reason"
_SLEEP = ("awake", "weights_offloaded", "discard_all")  # by level


def engine_rows(backend: Backend) -> list[MetricSample]:
    """Returns rows as old as the engine's latest heartbeat. While the model loads, there are few."""
    up = MetricSample("quintet:engine_up", (), [float(backend.unavailable_reason() is None)])
    rows = [
        msgspec.structs.replace(row, engine=number)
        for number, (served, stats) in enumerate(backend.engines())
        for row in (*_stats_rows(stats, served), *_labelled_rows(stats, served))
    ]
    return [*rows, up]


def _stats_rows(stats: Stats, served: ModelInfo) -> list[MetricSample]:
    queues, steps = stats.scheduler, stats.steps
    values = {name: number(stats) for name, number in _NUMBERS.items()}
    values["vllm:prompt_tokens_total"] = steps.num_prompt_tokens + queues.cached_tokens
    values["quintet:kv_pages_used"] = round(queues.kv_usage * served.num_pages)
    values["quintet:kv_pages_total"] = served.num_pages
    values["quintet:step_tokens"] = steps.step_tokens if queues.num_running else 0  # else the last step is old
    return [MetricSample(name, (), [value]) for name, value in values.items()]


def _labelled_rows(stats: Stats, served: ModelInfo) -> Iterator[MetricSample]:
    """Yields metrics with their own labels, and the histogram of step sizes."""
    queues, steps = stats.scheduler, stats.steps
    deferred = min(stats.num_deferred, queues.num_waiting)  # another thread counts without stopping the engine
    yield MetricSample(_WAITING, ("capacity",), [queues.num_waiting - deferred])
    yield MetricSample(_WAITING, ("deferred",), [deferred])
    for level, state in enumerate(_SLEEP):
        yield MetricSample("vllm:engine_sleep_state", (state,), [stats.asleep == level])
    yield MetricSample("vllm:prompt_tokens_by_source_total", ("local_compute",), [steps.num_prompt_tokens])
    yield MetricSample("vllm:prompt_tokens_by_source_total", ("local_cache_hit",), [queues.prefix_hits])
    yield MetricSample("vllm:prompt_tokens_by_source_total", ("external_kv_transfer",), [queues.external_hits])
    cached = {"device": queues.prefix_hits, "external_unspecified": queues.external_hits}
    for source, tokens in cached.items():
        yield MetricSample("vllm:prompt_tokens_cached_by_source_total", (source,), [tokens])
    for place, count in enumerate(stats.spec_decode.accepted_at):
        yield MetricSample("vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),), [count])
    yield MetricSample("vllm:iteration_tokens_total", (), [*steps.step_sizes, steps.num_tokens])
    if served.max_loras:
        names = (",".join(each) for each in (stats.lora.waiting_adapters, stats.lora.running_adapters))
        yield MetricSample("vllm:lora_requests_info", (str(served.max_loras), *names), [time.time()])
    yield MetricSample("quintet:weight_info", (stats.weights.weight_version,), [1])
    yield MetricSample("vllm:cache_config_info", _cache_labels(served), [1])


def _cache_labels(served: ModelInfo) -> tuple[str, ...]:
    """Returns label values in the order of CACHE_LABELS, formatted as in vLLM."""
    facts = (served.page_size, served.cache_dtype, served.prefix_caching, served.kv_tokens, served.num_pages)
    return tuple(map(str, facts))
