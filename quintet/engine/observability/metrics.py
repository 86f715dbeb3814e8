"""Metrics of an engine as objects with vLLM's names: counters, gauges, histograms and vectors of counters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from quintet.engine.observability.request_stats import RequestStats
from quintet.engine.observability.stats import STEP_BOUNDS, Stats

# vLLM's names -> fields of Stats that show as they are
GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "quintet:expert_balancedness": "expert_balancedness",
}
COUNTERS: Mapping[str, str] = {  # a scrape writes _total behind these
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:external_prefix_cache_queries": "external_queries",
    "vllm:external_prefix_cache_hits": "external_hits",
    "vllm:prompt_tokens_cached": "cached_tokens",
    "vllm:num_preemptions": "num_preemptions",
    "vllm:generation_tokens": "num_generation_tokens",
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "quintet:steps": "num_steps",
    "quintet:jump_forward_tokens": "num_jumped",
    "quintet:kv_pages_stored": "pages_stored",
    "quintet:kv_pages_loaded": "pages_loaded",
    "quintet:kv_pages_failed": "pages_failed",
    "quintet:expert_placements": "expert_placements",
    "quintet:experts_moved": "experts_moved",
    "quintet:kv_transfer_pages_taken": "pages_taken",
    "quintet:kv_transfer_bytes_taken": "bytes_taken",
    "quintet:kv_transfer_seconds_taken": "seconds_taken",
    "quintet:kv_transfer_pages_given": "pages_given",
    "quintet:kv_transfer_bytes_given": "bytes_given",
    "quintet:kv_transfer_peers_refused": "peers_refused",
    "quintet:kv_transfer_loans_refused": "loans_refused",
}


@dataclass
class Metric:
    """Name of a metric, and its labels: the model."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters in a row: here, accepted tokens by their place in the guess."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """Grows and shrinks."""

    value: float


@dataclass
class Histogram(Metric):
    """Number of values up to each bound, with those up to smaller bounds; "+Inf" is of all."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(stats: Stats, counts: RequestStats, model: str) -> list[Metric]:
    """Returns the metrics of the engine, gauges first; then those of its requests."""
    labels = {"model_name": model, "engine": "0"}
    return [*_of_engine(stats, labels), *_of_requests(counts, labels)]


def _of_engine(stats: Stats, labels: dict[str, str]) -> Iterator[Metric]:
    for name, field in GAUGES.items():
        yield Gauge(name, dict(labels), float(getattr(stats, field)))
    for name, field in COUNTERS.items():
        yield Counter(name, dict(labels), getattr(stats, field))
    yield Counter("vllm:prompt_tokens", dict(labels), stats.num_prompt_tokens + stats.cached_tokens)
    yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(labels), list(stats.accepted_at))
    buckets = _buckets(STEP_BOUNDS, stats.step_sizes)
    yield Histogram("vllm:iteration_tokens_total", dict(labels), buckets["+Inf"], float(stats.num_tokens), buckets)


def _of_requests(counts: RequestStats, labels: dict[str, str]) -> Iterator[Metric]:
    for reason, counter in counts.reasons():
        yield Counter("vllm:request_success", {**labels, "finished_reason": reason}, int(counter.value))
    yield Counter("quintet:requests_failed", dict(labels), int(counts.failed.value))
    for name, seen in counts.histograms():
        buckets = _buckets(seen.bounds, seen.counts)
        yield Histogram(name, dict(labels), buckets["+Inf"], seen.sum, buckets)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> dict[str, int]:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return dict(zip(names, accumulate(counts), strict=True))
