"""Sizes of an engine's steps and cache: the limits of a step, and the number of pages."""

from typing import Any

from quintet.config import EngineConfig
from quintet.config.scheduler import HOST_STEP_TOKENS, STEP_TOKENS
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.memory_planner import MemoryPlan, ModelMemory, plan_memory
from quintet.engine.parallel.setup import smallest_plan
from quintet.engine.step_plan import SchedulerLimits
from quintet.interface.platform import Capabilities
from quintet.interface.types import MaxShape, ShapeBucket

LONG_PREFILL_SHARE = 0.04  # of max_model_len: a prompt with more tokens is long, if no threshold is set
# tokens of a step, where stages take turns: a prompt's chunks follow one another, and all have work
MIN_STAGE_TOKENS = 128
MIN_LOGIT_ROWS = 256  # of a step, if it has as many tokens: the scores of a prompt come so many at a time


def scheduler_limits(config: EngineConfig, plan: MemoryPlan) -> SchedulerLimits:
    """Returns the limits of a step. Long prompts are limited as in vLLM; running requests also by the state slots."""
    length, most = plan.max_model_len, plan.max_requests
    staged = config.pipeline_parallel_size > 1 and config.enable_chunked_prefill
    several = (config.max_num_partial_prefills or 1) > 1
    long = config.long_prefill_token_threshold or (max(1, int(length * LONG_PREFILL_SHARE)) if several else 0)
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs if most is None else min(config.max_num_seqs, most),
        max_num_batched_tokens=min(config.step_tokens, MIN_STAGE_TOKENS) if staged else config.step_tokens,
        max_logit_rows=_logit_rows(config),
        chunked_prefill=config.enable_chunked_prefill,
        by_priority=config.scheduling_policy == "priority",
        long_prefill_threshold=long,
        max_partial_prefills=config.max_num_partial_prefills,
        max_long_prefills=config.max_long_partial_prefills or (1 if several else None),
        num_stages=config.pipeline_parallel_size,
        prefill_tokens_beside_decode=config.prefill_tokens_beside_decode or 0,
    )


def with_step_tokens(config: EngineConfig, facts: Capabilities, whole_runs: bool, reasons: list[str]) -> EngineConfig:
    """Sets max_num_batched_tokens if the user did not, and adds the reason if they are few. `whole_runs`: tokens of a
    picture see one another, and come in one step."""
    if config.max_num_batched_tokens is not None:
        return config
    in_host_memory = bool(facts.layout_key)
    if not in_host_memory or config.runner == "pooling" or whole_runs or not config.enable_chunked_prefill:
        return config.replace(max_num_batched_tokens=STEP_TOKENS)
    spec = config.speculative_config
    each = 2 + (0 if spec is None else spec.num_speculative_tokens)  # of a request that decodes, and one of a prompt
    tokens = min(STEP_TOKENS, max(HOST_STEP_TOKENS, each * config.max_num_seqs))
    reasons.append(
        f"max_num_batched_tokens={tokens}: a step's results take host memory beside the weights, and streams wait "
        "for a prompt's step"
    )
    return config.replace(max_num_batched_tokens=tokens)


def make_memory_plan(config: EngineConfig, hf_config: Any, sizes: ModelSizes, ranks: WorkerGroup) -> MemoryPlan:
    """Every rank plans; the one with the fewest pages decides, since all count alike."""
    tokens = config.step_tokens
    if not config.enable_chunked_prefill:  # a whole prompt must find room
        tokens = max(tokens, sizes.max_model_len)

    def plan(worker: Worker) -> MemoryPlan:
        most = largest_step(config.replace(max_num_batched_tokens=tokens), worker, sizes.max_model_len)
        width = hf_config.vocab_size if sizes.requested_outputs.logits else hf_config.hidden_size
        took = worker.estimate(MaxShape(most, hf_config.hidden_size, width))
        return plan_memory(
            config, ModelMemory(took, worker.kv_cache_layout, sizes.max_model_len, tokens), worker.device.memory()
        )

    least = min(ranks.map_workers(plan), key=lambda each: (each.num_pages, each.max_model_len))
    return least if ranks.channel is None else smallest_plan(least, ranks.channel)


def largest_step(config: EngineConfig, worker: Worker, length: int) -> ShapeBucket:
    """The largest step, with requests of so many tokens."""
    pages = -(-length // config.page_size)
    widths = worker.kv_cache_layout.table_widths(pages, worker.kv_cache_layout.encoder_pages(config.page_size))
    return ShapeBucket(config.step_tokens, config.max_num_seqs, _logit_rows(config), widths)


def _logit_rows(config: EngineConfig) -> int:
    """Rows of outputs that a step may have: one for each request, and room for the scores of prompts; where texts
    become numbers, one for each token."""
    if config.runner == "pooling":
        return config.step_tokens
    return min(config.step_tokens, max(MIN_LOGIT_ROWS, config.max_num_seqs + MIN_LOGIT_ROWS // 4))
