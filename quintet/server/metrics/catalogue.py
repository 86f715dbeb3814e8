"""Every metric that a scrape may show. docs/metrics.md compares each with vLLM's."""

from dataclasses import dataclass
from typing import Literal

from quintet.engine.observability.request_stats import (
    BETWEEN_TOKENS,
    COMPLETIONS,
    FIRST_TOKEN,
    LATENCY,
    PREEMPTIONS,
    TOKENS,
)
from quintet.engine.observability.stats import STEP_BOUNDS

Kind = Literal["gauge", "counter", "histogram"]

HTTP_BUCKETS = (0.1, 0.5, 1.0)
LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "kv_cache_size_tokens", "num_gpu_blocks")


@dataclass(frozen=True)
class MetricInfo:
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
ENGINE_METRICS = (
    MetricInfo("vllm:num_requests_running", "gauge", "Completions that the engine works on."),
    MetricInfo("vllm:num_requests_waiting", "gauge", "Completions that wait for their first step, or to go on."),
    MetricInfo(
        "vllm:num_requests_waiting_by_reason", "gauge", "Completions that wait for room (capacity), or for their "
        "grammar (deferred).", ("reason",),
    ),
    MetricInfo("vllm:engine_sleep_state", "gauge", "1 for the state that the engine is in.", ("sleep_state",)),
    MetricInfo("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache's pages that requests hold, 0 to 1."),
    MetricInfo(
        "vllm:prefix_cache_queries_total", "counter", "Tokens of prompts that were looked up in the prefix cache.",
    ),
    MetricInfo("vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that were found in the prefix cache."),
    MetricInfo(
        "vllm:external_prefix_cache_queries_total", "counter", "Tokens of prompts that were looked for outside the KV "
        "cache.",
    ),
    MetricInfo(
        "vllm:external_prefix_cache_hits_total", "counter", "Tokens of prompts that came from outside the KV cache."
    ),
    MetricInfo("vllm:num_preemptions_total", "counter", "Times that a request gave its pages back and began again."),
    MetricInfo(
        "vllm:prompt_tokens_total", "counter", "Tokens of prompts that were computed or found in the prefix cache.",
    ),
    MetricInfo(
        "vllm:prompt_tokens_by_source_total", "counter", "Tokens of prompts, computed (local_compute), found "
        "in the prefix cache (local_cache_hit) or loaded by a KV connector (external_kv_transfer).", ("source",),
    ),
    MetricInfo(
        "vllm:prompt_tokens_cached_by_source_total", "counter", "Tokens of prompts that were found in the prefix cache "
        "(device) or loaded by a KV connector (external_unspecified).", ("source",),
    ),
    MetricInfo("vllm:prompt_tokens_cached_total", "counter", "Tokens of prompts that did not have to be computed."),
    MetricInfo("vllm:generation_tokens_total", "counter", "Tokens that were drawn."),
    MetricInfo(
        "vllm:iteration_tokens_total", "histogram", "Tokens of a step, of prompts and of outputs.",
        buckets=tuple(map(float, STEP_BOUNDS)),
    ),
    MetricInfo("vllm:spec_decode_num_drafts_total", "counter", "Times that tokens of a completion were guessed."),
    MetricInfo("vllm:spec_decode_num_draft_tokens_total", "counter", "Tokens that were guessed."),
    MetricInfo("vllm:spec_decode_num_accepted_tokens_total", "counter", "Guessed tokens that were drawn."),
    MetricInfo(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
        "Guessed tokens that were drawn, by their place in the guess, from 0.", ("position",),
    ),
    MetricInfo(
        "quintet:spec_decode_disabled", "gauge", "1 where speculative decoding is turned off, because its proposer "
        "failed in several steps in a row; the log names the error.",
    ),
    MetricInfo(
        "vllm:lora_requests_info", "gauge", "Unix time of the scrape; the labels name the adapters (LoRA) of requests "
        "that run and that wait, 64 of each at most. Of a server without adapters there is none.", LORA_LABELS,
    ),
    MetricInfo("vllm:cache_config_info", "gauge", "1; the labels describe the KV cache.", CACHE_LABELS),
    MetricInfo("quintet:kv_pages_used", "gauge", "Pages of the KV cache that requests hold."),
    MetricInfo("quintet:kv_pages_total", "gauge", "Pages of the KV cache."),
    MetricInfo("quintet:step_tokens", "gauge", "Tokens of the last step; 0 while nothing runs."),
    MetricInfo("quintet:steps_total", "counter", "Steps of the engine."),
    MetricInfo(
        "quintet:jump_forward_tokens_total", "counter", "Tokens that were not drawn: a grammar left no other."
    ),
    MetricInfo("quintet:encoder_passes_total", "counter", "Passes of the model's encoder."),
    MetricInfo(
        "quintet:encoder_cache_hits_total", "counter", "Requests whose media had been encoded for an earlier one.",
    ),
    MetricInfo("quintet:kv_pages_stored_total", "counter", "Pages that were kept outside the KV cache."),
    MetricInfo("quintet:kv_pages_loaded_total", "counter", "Pages that came from outside the KV cache."),
    MetricInfo("quintet:kv_pages_failed_total", "counter", "Pages that were to come from there, and did not."),
    MetricInfo("quintet:kv_transfer_pages_taken_total", "counter", "Pages that came from other engines."),
    MetricInfo("quintet:kv_transfer_bytes_taken_total", "counter", "Bytes of these."),
    MetricInfo("quintet:kv_transfer_seconds_taken_total", "counter", "Seconds that their transfers took, one by one."),
    MetricInfo("quintet:kv_transfer_pages_given_total", "counter", "Pages that other engines took."),
    MetricInfo("quintet:kv_transfer_bytes_given_total", "counter", "Bytes of these."),
    MetricInfo(
        "quintet:kv_transfer_peers_refused_total", "counter", "Connections of others with another key or model, or "
        "that broke the protocol.",
    ),
    MetricInfo(
        "quintet:kv_transfer_loans_refused_total", "counter", "Prompts whose pages found no room to wait for another "
        "engine.",
    ),
    MetricInfo(
        "quintet:expert_balancedness", "gauge",
        "Mean over most of what ranks had to do for experts in the last window; 0 without enable_eplb.",
    ),
    MetricInfo("quintet:weight_info", "gauge", "1; the label is the version of the weights.", ("weight_version",)),
    MetricInfo("quintet:weight_updates_total", "counter", "Times that other weights came while the engine ran."),
    MetricInfo("quintet:paused", "gauge", "1 while no step may start: a pause, or an update of the weights."),
    MetricInfo("quintet:weights_torn", "gauge", "1 after an update of the weights that failed half-way."),
    MetricInfo("quintet:expert_placements_total", "counter", "Times that experts moved between ranks."),
    MetricInfo("quintet:experts_moved_total", "counter", "Experts that came to a rank from another."),
    MetricInfo(
        "quintet:engine_up", "gauge", "1 if the engine can serve, 0 while it loads, hangs or is dead; of several, all.",
        of_model=False,
    ),
)  # fmt: skip

# Metrics that each API process counts; a scrape shows the sum.
API_METRICS = (
    MetricInfo(
        "vllm:request_success_total", "counter", "Completions that ended, failures among them.", ("finished_reason",)
    ),
    MetricInfo(
        "vllm:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
        buckets=FIRST_TOKEN,
    ),
    MetricInfo(
        "vllm:inter_token_latency_seconds", "histogram", "Between two tokens of a completion.", buckets=BETWEEN_TOKENS
    ),
    MetricInfo(
        "vllm:request_time_per_output_token_seconds", "histogram",
        "A request's mean time between two tokens, if it has two.", buckets=BETWEEN_TOKENS,
    ),
    MetricInfo(
        "vllm:e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", buckets=LATENCY,
    ),
    MetricInfo(
        "vllm:request_queue_time_seconds", "histogram", "From a request's arrival to its first step.", buckets=LATENCY
    ),
    MetricInfo(
        "vllm:request_prefill_time_seconds", "histogram", "From a request's first step to its first token.",
        buckets=LATENCY,
    ),
    MetricInfo(
        "vllm:request_decode_time_seconds", "histogram", "From a request's first token to its last.", buckets=LATENCY
    ),
    MetricInfo(
        "vllm:request_inference_time_seconds", "histogram", "From a request's first step to its last token.",
        buckets=LATENCY,
    ),
    MetricInfo("vllm:request_prompt_tokens", "histogram", "Tokens of a request's prompt.", buckets=TOKENS),
    MetricInfo(
        "vllm:request_prefill_kv_computed_tokens", "histogram",
        "Tokens of a request's prompt that were not found in the prefix cache.", buckets=TOKENS,
    ),
    MetricInfo("vllm:request_generation_tokens", "histogram", "Tokens of a completion.", buckets=TOKENS),
    MetricInfo(
        "vllm:request_max_num_generation_tokens", "histogram", "Tokens of a request's longest completion.",
        buckets=TOKENS,
    ),
    MetricInfo(
        "vllm:request_num_preemptions", "histogram", "Times that a request gave its pages back.", buckets=PREEMPTIONS
    ),
    MetricInfo("vllm:request_params_n", "histogram", "Completions that a request asks for (n).", buckets=COMPLETIONS),
    MetricInfo(
        "vllm:request_params_max_tokens", "histogram", "The max_tokens of requests that set it.", buckets=TOKENS
    ),
    MetricInfo(
        "quintet:requests_aborted_total", "counter",
        "Requests that were ended early: the client hung up, time ran out, or the server went down.",
    ),
    MetricInfo("quintet:requests_failed_total", "counter", "Requests that ended in a failure of the engine."),
    MetricInfo(
        "quintet:requests_refused_total", "counter", "HTTP requests that were turned away, probes left out.",
        ("reason",), of_model=False,
    ),
    MetricInfo(
        "quintet:http_requests_total", "counter", "HTTP responses that were begun; no route is \"none\".",
        ("route", "method", "status"), of_model=False,
    ),
    MetricInfo(
        "http_requests_total", "counter", "HTTP responses that were begun, by class of status, probes left out.",
        ("handler", "method", "status"), of_model=False,
    ),
    MetricInfo(
        "http_request_duration_seconds", "histogram", "From an HTTP request's arrival to the end of its response, "
        "probes left out.", ("handler", "method"), buckets=HTTP_BUCKETS, of_model=False,
    ),
    MetricInfo("quintet:api_calls", "gauge", "Calls of the API that are under way.", of_model=False),
    MetricInfo("quintet:open_connections", "gauge", "HTTP connections that are open.", of_model=False),
)  # fmt: skip

# Metrics that only the scraped process adds.
SCRAPE_METRICS = (
    MetricInfo("quintet:peers_silent", "gauge", "API processes whose counts this scrape lacks.", of_model=False),
)  # fmt: skip

ALL_METRICS = (*ENGINE_METRICS, *API_METRICS, *SCRAPE_METRICS)
