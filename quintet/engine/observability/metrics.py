"""Metrics of an engine as objects with vLLM's names: counters, gauges, histograms and vectors of counters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from quintet.engine.observability.request_stats import RequestStats
from quintet.engine.observability.stats import STEP_BOUNDS, Stats

# vLLM's names -> numbers of Stats that show as they are
GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "scheduler.num_running",
    "vllm:num_requests_waiting": "scheduler.num_waiting",
    "vllm:kv_cache_usage_perc": "scheduler.kv_usage",
    "quintet:expert_balancedness": "experts.expert_balancedness",
    "quintet:spec_decode_disabled": "spec_decode.num_disabled",
    "quintet:paused": "weights.paused",
    "quintet:weights_torn": "weights.torn",
}
COUNTERS: Mapping[str, str] = {  # a scrape writes _total behind these
    "vllm:prefix_cache_queries": "scheduler.prefix_queries",
    "vllm:prefix_cache_hits": "scheduler.prefix_hits",
    "vllm:external_prefix_cache_queries": "kv_connector.external_queries",
    "vllm:external_prefix_cache_hits": "scheduler.external_hits",
    "vllm:prompt_tokens_cached": "scheduler.cached_tokens",
    "vllm:num_preemptions": "scheduler.num_preemptions",
    "vllm:generation_tokens": "steps.num_generation_tokens",
    "vllm:spec_decode_num_drafts": "spec_decode.num_drafts",
    "vllm:spec_decode_num_draft_tokens": "spec_decode.num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "spec_decode.num_accepted_tokens",
    "quintet:steps": "steps.num_steps",
    "quintet:jump_forward_tokens": "steps.num_jumped",
    "quintet:encoder_passes": "encoder.num_encoder_passes",
    "quintet:encoder_cache_hits": "encoder.num_encoder_hits",
    "quintet:kv_pages_stored": "kv_connector.pages_stored",
    "quintet:kv_pages_loaded": "kv_connector.pages_loaded",
    "quintet:kv_pages_failed": "kv_connector.pages_failed",
    "quintet:weight_updates": "weights.weight_updates",
    "quintet:expert_placements": "experts.expert_placements",
    "quintet:experts_moved": "experts.experts_moved",
    "quintet:kv_transfer_pages_taken": "page_transfer.pages_taken",
    "quintet:kv_transfer_bytes_taken": "page_transfer.bytes_taken",
    "quintet:kv_transfer_seconds_taken": "page_transfer.seconds_taken",
    "quintet:kv_transfer_pages_given": "page_transfer.pages_given",
    "quintet:kv_transfer_bytes_given": "page_transfer.bytes_given",
    "quintet:kv_transfer_peers_refused": "page_transfer.peers_refused",
    "quintet:kv_transfer_loans_refused": "page_transfer.loans_refused",
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
    steps = stats.steps
    for name, path in GAUGES.items():
        yield Gauge(name, dict(labels), float(attrgetter(path)(stats)))
    for name, path in COUNTERS.items():
        yield Counter(name, dict(labels), attrgetter(path)(stats))
    yield Counter("vllm:prompt_tokens", dict(labels), steps.num_prompt_tokens + stats.scheduler.cached_tokens)
    yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(labels), list(stats.spec_decode.accepted_at))
    buckets = _buckets(STEP_BOUNDS, steps.step_sizes)
    yield Histogram("vllm:iteration_tokens_total", dict(labels), buckets["+Inf"], float(steps.num_tokens), buckets)


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
