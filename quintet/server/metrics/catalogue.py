"""Every metric that a scrape may show. docs/metrics.md compares each with vLLM's."""

from dataclasses import dataclass
from typing import Literal

from quintet.engine.observability.request_stats import BETWEEN_TOKENS, COMPLETIONS, FIRST_TOKEN, LATENCY, TOKENS
from quintet.engine.observability.stats import STEP_BOUNDS

Kind = Literal["gauge", "counter", "histogram"]

HTTP = (0.1, 0.5, 1.0)
CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_size_tokens", "num_gpu_blocks")


@dataclass(frozen=True)
class Metric:
    """A name and what it means. Metrics of the model have the labels model_name and engine before their own."""

    name: str  # in full: a counter's ends in _total
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    of_model: bool = True

    @property
    def all_labels(self) -> tuple[str, ...]:
        return ("model_name", "engine", *self.labels) if self.of_model else self.labels


# Metrics of the engine: equal in all API processes, so never added up.
ENGINE = (
    Metric("vllm:num_requests_running", "gauge", "Completions that the engine works on."),
    Metric("vllm:num_requests_waiting", "gauge", "Completions that wait for their first step, or to go on."),
    Metric(
        "vllm:num_requests_waiting_by_reason", "gauge", "Completions that wait for room (capacity), or for their "
        "grammar (deferred).", ("reason",),
    ),
    Metric("vllm:engine_sleep_state", "gauge", "1 for the state that the engine is in.", ("sleep_state",)),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache's pages that requests hold, 0 to 1."),
    Metric("vllm:prefix_cache_queries_total", "counter", "Tokens of prompts that were looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that were found in the prefix cache."),
    Metric(
        "vllm:external_prefix_cache_queries_total", "counter", "Tokens of prompts that were looked for outside the KV "
        "cache.",
    ),
    Metric(
        "vllm:external_prefix_cache_hits_total", "counter", "Tokens of prompts that came from outside the KV cache."
    ),
    Metric("vllm:num_preemptions_total", "counter", "Times that a request gave its pages back and began again."),
    Metric("vllm:prompt_tokens_total", "counter", "Tokens of prompts that were computed or found in the prefix cache."),
    Metric(
        "vllm:prompt_tokens_by_source_total", "counter", "Tokens of prompts, computed (local_compute), found "
        "in the prefix cache (local_cache_hit) or loaded by a KV connector (external_kv_transfer).", ("source",),
    ),
    Metric("vllm:prompt_tokens_cached_total", "counter", "Tokens of prompts that did not have to be computed."),
    Metric("vllm:generation_tokens_total", "counter", "Tokens that were drawn."),
    Metric(
        "vllm:iteration_tokens_total", "histogram", "Tokens of a step, of prompts and of outputs.",
        buckets=tuple(map(float, STEP_BOUNDS)),
    ),
    Metric("vllm:spec_decode_num_drafts_total", "counter", "Times that tokens of a completion were guessed."),
    Metric("vllm:spec_decode_num_draft_tokens_total", "counter", "Tokens that were guessed."),
    Metric("vllm:spec_decode_num_accepted_tokens_total", "counter", "Guessed tokens that were drawn."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
        "Guessed tokens that were drawn, by their place in the guess, from 0.", ("position",),
    ),
    Metric("vllm:cache_config_info", "gauge", "1; the labels describe the KV cache.", CACHE_LABELS),
    Metric("quintet:kv_pages_used", "gauge", "Pages of the KV cache that requests hold."),
    Metric("quintet:kv_pages_total", "gauge", "Pages of the KV cache."),
    Metric("quintet:step_tokens", "gauge", "Tokens of the last step; 0 while nothing runs."),
    Metric("quintet:steps_total", "counter", "Steps of the engine."),
    Metric(
        "quintet:jump_forward_tokens_total", "counter", "Tokens that were not drawn: a grammar left no other."
    ),
    Metric("quintet:kv_pages_stored_total", "counter", "Pages that were kept outside the KV cache."),
    Metric("quintet:kv_pages_loaded_total", "counter", "Pages that came from outside the KV cache."),
    Metric("quintet:kv_pages_failed_total", "counter", "Pages that were to come from there, and did not."),
    Metric("quintet:kv_transfer_pages_taken_total", "counter", "Pages that came from other engines."),
    Metric("quintet:kv_transfer_bytes_taken_total", "counter", "Bytes of these."),
    Metric("quintet:kv_transfer_seconds_taken_total", "counter", "Seconds that their transfers took, one by one."),
    Metric("quintet:kv_transfer_pages_given_total", "counter", "Pages that other engines took."),
    Metric("quintet:kv_transfer_bytes_given_total", "counter", "Bytes of these."),
    Metric(
        "quintet:kv_transfer_peers_refused_total", "counter", "Connections of others with another key or model, or "
        "that broke the protocol.",
    ),
    Metric(
        "quintet:kv_transfer_loans_refused_total", "counter", "Prompts whose pages found no room to wait for another "
        "engine.",
    ),
    Metric(
        "quintet:expert_balancedness", "gauge",
        "Mean over most of what ranks had to do for experts in the last window; 0 without enable_eplb.",
    ),
    Metric("quintet:expert_placements_total", "counter", "Times that experts moved between ranks."),
    Metric("quintet:experts_moved_total", "counter", "Experts that came to a rank from another."),
    Metric(
        "quintet:engine_up", "gauge", "1 if the engine can serve, 0 while it loads, hangs or is dead; of several, all.",
        of_model=False,
    ),
)  # fmt: skip

# Metrics that each API process counts; a scrape shows the sum.
SERVED = (
    Metric(
        "vllm:request_success_total", "counter", "Completions that ended, failures among them.", ("finished_reason",)
    ),
    Metric(
        "vllm:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
        buckets=FIRST_TOKEN,
    ),
    Metric(
        "vllm:inter_token_latency_seconds", "histogram", "Between two tokens of a completion.", buckets=BETWEEN_TOKENS
    ),
    Metric(
        "vllm:request_time_per_output_token_seconds", "histogram",
        "A request's mean time between two tokens, if it has two.", buckets=BETWEEN_TOKENS,
    ),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", buckets=LATENCY),
    Metric(
        "vllm:request_queue_time_seconds", "histogram", "From a request's arrival to its first step.", buckets=LATENCY
    ),
    Metric(
        "vllm:request_prefill_time_seconds", "histogram", "From a request's first step to its first token.",
        buckets=LATENCY,
    ),
    Metric(
        "vllm:request_decode_time_seconds", "histogram", "From a request's first token to its last.", buckets=LATENCY
    ),
    Metric(
        "vllm:request_inference_time_seconds", "histogram", "From a request's first step to its last token.",
        buckets=LATENCY,
    ),
    Metric("vllm:request_prompt_tokens", "histogram", "Tokens of a request's prompt.", buckets=TOKENS),
    Metric(
        "vllm:request_prefill_kv_computed_tokens", "histogram",
        "Tokens of a request's prompt that were not found in the prefix cache.", buckets=TOKENS,
    ),
    Metric("vllm:request_generation_tokens", "histogram", "Tokens of a completion.", buckets=TOKENS),
    Metric(
        "vllm:request_max_num_generation_tokens", "histogram", "Tokens of a request's longest completion.",
        buckets=TOKENS,
    ),
    Metric("vllm:request_params_n", "histogram", "Completions that a request asks for (n).", buckets=COMPLETIONS),
    Metric(
        "vllm:request_params_max_tokens", "histogram", "The max_tokens of requests that set it.", buckets=TOKENS
    ),
    Metric(
        "quintet:requests_aborted_total", "counter",
        "Requests that were ended early: the client hung up, time ran out, or the server went down.",
    ),
    Metric("quintet:requests_failed_total", "counter", "Requests that ended in a failure of the engine."),
    Metric(
        "quintet:requests_refused_total", "counter", "HTTP requests that were turned away, probes left out.",
        ("reason",), of_model=False,
    ),
    Metric(
        "quintet:http_requests_total", "counter", "HTTP responses that were begun; no route is \"none\".",
        ("route", "method", "status"), of_model=False,
    ),
    Metric(
        "http_requests_total", "counter", "HTTP responses that were begun, by class of status, probes left out.",
        ("handler", "method", "status"), of_model=False,
    ),
    Metric(
        "http_request_duration_seconds", "histogram", "From an HTTP request's arrival to the end of its response, "
        "probes left out.", ("handler", "method"), buckets=HTTP, of_model=False,
    ),
    Metric("quintet:api_calls", "gauge", "Calls of the API that are under way.", of_model=False),
    Metric("quintet:open_connections", "gauge", "HTTP connections that are open.", of_model=False),
)  # fmt: skip

# Metrics that only the scraped process adds.
SCRAPE = (
    Metric("quintet:peers_silent", "gauge", "API processes whose counts this scrape lacks.", of_model=False),
)  # fmt: skip

METRICS = (*ENGINE, *SERVED, *SCRAPE)
