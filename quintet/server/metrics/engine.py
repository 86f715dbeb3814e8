"""What the engine tells of itself, as rows of the scrape."""

from collections.abc import Mapping

from quintet.server.backend import Backend, EngineDead, Served
from quintet.server.metrics.series import Row

# metric -> the field of Engine.Stats that it shows
_FIELDS = {
    "vllm:num_requests_running": "num_running",
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:generation_tokens_total": "num_generation_tokens",
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
    "quintet:steps_total": "num_steps",
}


def engine_rows(backend: Backend) -> list[Row]:
    """At most as old as the engine's latest sign of life. While the model is loading there is little to tell."""
    up = Row("quintet:engine_up", (), [float(backend.trouble() is None)])
    try:
        served = backend.served
    except EngineDead:
        return [up]
    stats = backend.stats()
    return [*_told(stats, served), up] if stats else [up]


def _told(stats: Mapping[str, float], served: Served) -> list[Row]:
    values = {name: stats[field] for name, field in _FIELDS.items()}
    values["vllm:prompt_tokens_total"] = stats["num_prompt_tokens"] + stats["prefix_hits"]
    values["quintet:kv_pages_used"] = round(stats["kv_usage"] * served.num_pages)
    values["quintet:kv_pages_total"] = served.num_pages
    values["quintet:step_tokens"] = stats["step_tokens"] if stats["num_running"] else 0  # else it is of long ago
    return [Row(name, (), [value]) for name, value in values.items()]
