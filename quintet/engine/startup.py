"""From a configuration to a running engine, in two stages: prepare() decides everything, launch() loads and runs.

`quintet explain` stops after the first, so what it prints is what would happen.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quintet.config import EngineConfig, read_environment
from quintet.engine.encoder import factory as encoders
from quintet.engine.encoder.runner import SpeechModelRunner
from quintet.engine.engine import Engine
from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.model_runner import ModelRunner, StepRunner
from quintet.engine.executor.model_weights import weights_cache_for, weights_for
from quintet.engine.executor.routed_experts import check_routed_experts, describe_routed_experts, make_store
from quintet.engine.executor.shape_buckets import describe
from quintet.engine.executor.warm_up import warm_up
from quintet.engine.executor.worker import MemoryRoom, Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.events import KVEventLog, make_event_log
from quintet.engine.kv_cache.kv_scales import calibrate, kv_scaling
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.kv_cache.state_slots import StateSlotPool
from quintet.engine.kv_transfer.factory import check_kv_transfer, make_kv_transfer
from quintet.engine.lora.factory import lora_sizes, make_lora
from quintet.engine.media.factory import Checkpoint, ServedMedia, served_media, whole_prompt_config
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.observability.profiler import Profiler
from quintet.engine.observability.spans import Spans
from quintet.engine.parallel import expert_parallel as experts
from quintet.engine.parallel import setup as ranking
from quintet.engine.parallel.eplb.balancer import ExpertBalancer
from quintet.engine.parallel.pipeline import PipelineRunner
from quintet.engine.parallel.step_agreement import StepAgreement
from quintet.engine.platform_support import features_of, support_evidence
from quintet.engine.pooling.factory import head_tensors, make_pooler, pooling_of, resolve_pooling
from quintet.engine.pooling.runner import PoolingRunner
from quintet.engine.quantization import TargetPlatform, describe_quantization, resolve_quantization
from quintet.engine.row_store.factory import describe_row_store, make_row_store, row_store_sizes
from quintet.engine.sampling.load_processors import load_processors
from quintet.engine.sampling.sampler import HostSampling, Sampler, logprob_sizes
from quintet.engine.scheduler import Scheduler
from quintet.engine.sizing import make_memory_plan, scheduler_limits, with_step_tokens
from quintet.engine.spec_decode.drafter import with_drafter
from quintet.engine.spec_decode.factory import make_drafting, make_step_costs
from quintet.hub.dtypes import dtype_of, kv_dtype_of
from quintet.hub.max_model_len import resolve_max_model_len
from quintet.hub.model_impl import read_model
from quintet.hub.pooling_task import Pooling, is_pooling_model
from quintet.hub.resolve import load_generation_config, resolve_config, resolve_model, separate_quantization_config
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.types import RankInfo
from quintet.layers.build import RequestedOutputs
from quintet.layers.decoder import ModelBase
from quintet.media.audio.encoder_input import SpeechInput
from quintet.model_loader.gguf_config import resolve_mmproj
from quintet.model_loader.loader import check_counts, tensors_of
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.text_names import describe_files
from quintet.model_loader.tied_head import is_tied
from quintet.model_loader.weight_files import WeightFiles
from quintet.models import model_class
from quintet.ops import bind
from quintet.ops.activation import UnknownActivation
from quintet.platforms import SelectedPlatform, choose
from quintet.structured_output.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

POOLED = RequestedOutputs(logits=False, hidden_states=True)


class ModelFiles(NamedTuple):
    """A model's weights, and the model family that reads them."""

    folder: WeightFiles
    family: type[ModelBase]


def prepare(
    config: EngineConfig, chosen: SelectedPlatform | None = None, rank_info: RankInfo | None = None, met: bool = True
) -> EnginePlan:
    """Chooses the platform, reads the model's configuration, plans the memory. ValueError or OSError says why not.

    Where ranks are processes, it starts the others; `place` says that this is one of those, and where the ranks meet.
    `met`: False if nothing will be launched, so that no process is needed.
    """
    config = ranking.with_launcher_values(read_environment().apply(config))
    chosen = chosen or choose(config.device)
    config, settled = chosen.configure(config)
    reasons = [f"platform {chosen.platform.name}: {chosen.reason}", *settled]
    ranking.check_engines(config, chosen.capabilities)
    ranking.check_stages(config, chosen.platform.name, chosen.capabilities)
    folder = resolve_model(config)
    config, described = resolve_mmproj(config, folder)
    reasons += described
    facts = chosen.capabilities
    if not ranking.uses_processes(config, facts) or ranking.num_ranks(config, facts) == 1:
        return _decide(config, chosen, folder, reasons)
    meeting = ranking.join_ranks(config, facts, rank_info, met)
    with ranking.closing_on_error(meeting.remote_ranks):
        return _decide(config, chosen, folder, reasons, meeting)


def _decide(
    config: EngineConfig,
    chosen: SelectedPlatform,
    folder: Path,
    reasons: list[str],
    meeting: ranking.ParallelGroup | None = None,
) -> EnginePlan:
    facts, platform = chosen.capabilities, chosen.platform(config)
    place = resolve_config(config, folder)
    whole, backend = _read_model(config, place, chosen.capabilities, platform, reasons)
    config = config.replace(runner="pooling") if is_pooling_model(config, vars(whole), folder) else config
    media = served_media(config, facts, platform, Checkpoint(place, whole, bool(backend)))
    generation = load_generation_config(place, config.generation_config, config.override_generation_config)
    (hf_config, ignored), weights = media.text_config(config), weights_for(config, folder, facts)  # of a wrapper's text
    family = encoders.checked_family(config, hf_config, model_class(hf_config, platform.models, bool(backend)))
    files = ModelFiles(weights, family) if config.load_format not in ("dummy", *SHARDED) else None
    there = functools.partial(tensors_of, *files) if files else dict
    forms = resolve_quantization(
        config, whole, TargetPlatform(platform.name, facts), there, separate_quantization_config(folder)
    )
    if files is not None:
        reasons += describe_files(config, hf_config.model_type, weights, media.why, media.kinds)
        check_counts(weights, files.family, hf_config)
    pooling = pooling_of(config, whole, folder, family)
    config = _step_config(config, facts, pooling, media, reasons)
    dtype, kv_dtype = dtype_of(config, hf_config, facts, reasons), kv_dtype_of(config, facts)
    scaling = kv_scaling(config, facts, None if files is None else there, reasons)
    made_for = None if pooling is None else pooling.length
    length = resolve_max_model_len(config, hf_config, family.max_text_length(hf_config), made_for)
    sizes = ModelSizes(dtype, config.page_size, length, forms, kv_dtype, scaling, attention=config.attention_backend)
    rows = row_store_sizes(config, facts, platform.name, length, media)
    sizes = replace(sizes, lora=lora_sizes(config, facts, platform.name, dtype), row_store=rows, tower=media.sizes)
    sizes = replace(sizes, transformers_backend=bool(backend), ignored_tensors=(*ignored, *head_tensors(pooling)))
    sizes = replace(sizes, weights_cache=weights_cache_for(config, facts, weights))
    tied = None if pooling is not None else is_tied(there(), (hf_config, whole))
    sizes = replace(sizes, expert_placement=experts.expert_placement_of(config, facts), tied_head=tied)
    if pooling is not None:
        sizes = replace(sizes, requested_outputs=POOLED, causal=pooling.causal)
    elif config.enable_return_routed_experts:
        sizes = replace(sizes, requested_outputs=RequestedOutputs(routed_experts=True))
    sizes = with_drafter(config, facts, platform, whole, sizes, reasons)
    profiler = Profiler(config.profiler_config, platform)
    with _name_model_in_errors(config.model):
        ranks = ranking.make_workers(
            config, facts, meeting, lambda place: Worker(platform, hf_config, sizes, place, profiler.wrap_op)
        )
    check_kv_transfer(config, facts, ranks)
    check_routed_experts(config, ranks.workers[0].model, ranks.workers[0].main.build.routed_experts)
    ranking.check_same_settings(config, ranks, whole, None if config.load_format == "dummy" else weights)
    plan = make_memory_plan(config, hf_config, sizes, ranks)
    if plan.max_model_len != sizes.max_model_len:
        sizes = sizes.with_length(plan.max_model_len)
        ranks.map_workers(lambda worker: worker.build(hf_config, sizes))
    config = _fit_config(config, plan, platform, facts, reasons)
    reasons += [*describe_quantization(forms, ranks.workers[0]), *_descriptions(config, facts, ranks)]
    doubts = support_evidence(chosen).unproven_features(platform.name, features_of(config, hf_config, sizes))
    return EnginePlan(
        config, platform, facts, tuple(reasons), folder, hf_config, generation, sizes, ranks, plan, pooling,
        doubts, profiler, media,
    )  # fmt: skip


def _step_config(
    config: EngineConfig,
    facts: Capabilities,
    pooling: Pooling | None,
    media: ServedMedia,
    reasons: list[str],
) -> EngineConfig:
    """Resolves what the task and the media determine of a step."""
    if pooling is None:
        config = whole_prompt_config(config, media, reasons)
    else:
        config = resolve_pooling(config, pooling, reasons)
    return with_step_tokens(config, facts, media.whole_runs, reasons)


def _descriptions(config: EngineConfig, facts: Capabilities, ranks: WorkerGroup) -> list[str]:
    """Describes what ranks, experts and rows take."""
    first = ranks.workers[0]
    described = [*experts.describe_experts(config, first.model), *describe_row_store(first)]
    described += describe_routed_experts(first.main.build.routed_experts)
    return [*ranking.describe_ranks(config, facts, ranks), *described]


def _read_model(
    config: EngineConfig, place: Path, facts: Capabilities, platform: Platform, reasons: list[str]
) -> tuple[Any, str]:
    """Reads the model's configuration -> it, and why transformers' code computes the model; "" where ours does."""
    whole, backend = read_model(config, place, platform.models)
    if backend and facts.ops_only:
        raise ValueError(f"{backend}, which platform {platform.name} does not compile; choose another device or model")
    reasons += [backend] if backend else []
    return whole, backend


def _fit_config(
    config: EngineConfig, plan: MemoryPlan, platform: Platform, facts: Capabilities, reasons: list[str]
) -> EngineConfig:
    """The settings as the plan leaves them; ValueError where they contradict it."""
    if config.long_prefill_token_threshold > plan.max_model_len:
        raise ValueError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} is beyond max_model_len="
            f"{plan.max_model_len}, so that no prompt is long; lower it, or leave it out"
        )
    if not config.enable_chunked_prefill and config.step_tokens < plan.max_model_len:
        reasons.append(f"max_num_batched_tokens={plan.max_model_len}: a whole prompt must fit without chunked prefill")
        config = config.replace(max_num_batched_tokens=plan.max_model_len)
    captures = [each for each in ("capture_ahead", "capture_sizes", "max_capture_size") if getattr(config, each)]
    if captures and not plan.buckets:
        reasons.append(f"{', '.join(captures)}: nothing changes, for platform {platform.name} captures no steps")
    if config.logits_processors and facts.ops_only:
        reasons.append("sampling on the host: logits processors cannot read what the device holds")
    return config


@contextlib.contextmanager
def _name_model_in_errors(model: str) -> Iterator[None]:
    """Adds the model's name to the error of an unknown activation; a layer does not know it."""
    try:
        yield
    except UnknownActivation as error:
        raise ValueError(f"the model {model!r} cannot run here: {error}") from None


def launch(prepared: EnginePlan, progress: bool = True, grammars: GrammarCompiler | None = None) -> Engine:
    """Reads the weights, makes the cache, compiles the step. Without `grammars`, no request may ask for one."""
    with ranking.closing_on_error(prepared.ranks.remote_ranks):
        return _launch(prepared, progress, grammars)


def _launch(prepared: EnginePlan, progress: bool, grammars: GrammarCompiler | None) -> Engine:
    config, plan = prepared.config, prepared.memory_plan
    for reason in prepared.reasons:
        logger.info("%s", reason)
    if prepared.unproven_features:
        logger.warning("%s", prepared.unproven_features)
    logger.info("memory: %s", plan)
    logger.info("ops: %s", _op_table(prepared))
    fixed, buckets = prepared.fixed_shapes, prepared.buckets
    if fixed:
        logger.info("sizes: %s", describe(fixed))
    folder = None if config.load_format == "dummy" else weights_for(config, prepared.folder, prepared.capabilities)
    ahead = plan.steps_to_capture(config.capture_ahead, config.capture_decode_ahead)
    room = MemoryRoom(plan.num_pages, plan.num_slots)
    with _name_model_in_errors(config.model):  # a device that compiles sees what a layer asks for only now
        prepared.ranks.map_workers(lambda w: w.load(folder, room, buckets, progress and w.rank_info.rank == 0, ahead))
    if prepared.ranks.channel is not None:
        prepared.ranks.channel.exchange(b"")  # all have loaded: from now on no rank has a reason to be late
    layout, captured = prepared.ranks.workers[0].kv_cache_layout, () if fixed else buckets
    groups = len(layout.groups), layout.state_columns if plan.num_slots else 0
    batches = BatchBuilder(config.page_size, fixed, *groups, captured, prepared.inputs, layout.has_cross)
    runner = _runner(prepared, batches)
    runner.routed_experts = make_store(prepared)
    runner.warm_up(progress)
    _run_first_requests(prepared, batches, runner)
    return ranking.make_engine(_engine_parts(prepared, batches, runner, grammars, folder), prepared.ranks)


def _engine_parts(
    prepared: EnginePlan,
    batches: BatchBuilder,
    runner: StepRunner,
    grammars: GrammarCompiler | None,
    folder: WeightFiles | None,
) -> EngineParts:
    """Makes the parts of the engine that serves."""
    config, ranks, profiler = prepared.config, prepared.ranks, prepared.profiler
    journal = None
    if config.kv_events_config.is_enabled and ranking.is_leader(ranks):
        journal = make_event_log(config.kv_events_config, config.page_size, config.data_parallel_rank or 0)
    tables = _kv_cache_manager(prepared, config.enable_prefix_caching, journal)
    kv_transfer = make_kv_transfer(prepared, tables, folder)
    drafting = make_drafting(config, prepared.sizes, runner, batches, tables)
    lora = make_lora(config, ranks, ranking.lora_role(ranks), runner.adapted_heads)
    slots = None if lora is None else lora.slots
    num_drafts = 0 if drafting is None else drafting.num_drafts
    if tables.state_slots is not None and tables.state_slots.max_drafts:
        num_drafts = _held_drafts(num_drafts, tables.state_slots.max_drafts)
    scheduler = Scheduler(scheduler_limits(config, prepared.memory_plan), tables, num_drafts, kv_transfer, slots)
    balancer = ExpertBalancer(config.eplb_config, ranks) if config.enable_eplb else None
    tracer = None if profiler.wrap_op is None else profiler
    costs = make_step_costs(drafting, ranking.lora_role(ranks))
    hooks = tuple(hook for hook in (tracer, kv_transfer, lora, balancer, journal, costs) if hook is not None)
    overlap = prepared.capabilities.overlap
    rotary = prepared.served_media.rotary(prepared.memory_plan.max_model_len)
    return EngineParts(scheduler, runner, overlap, grammars, profiler, lora, drafting, hooks, rotary, config)


def _held_drafts(wanted: int, held: int) -> int:
    """Returns the most drafts of a request, where states keep so many apart; a smaller number than wanted is logged."""
    if held < wanted:
        logger.info("speculative decoding: %d drafts of a request at most, not %d: states keep no more", held, wanted)
    return min(wanted, held)


def _kv_cache_manager(prepared: EnginePlan, caching: bool, journal: KVEventLog | None = None) -> KVCacheManager:
    """Makes the bookkeeping of all pages and states."""
    config, plan, worker = prepared.config, prepared.memory_plan, prepared.ranks.workers[0]
    drafts = worker.kv_cache_layout.max_drafts
    slots = StateSlotPool(plan.num_slots, caching, drafts) if plan.num_slots else None
    pool = PagePool(plan.num_pages, caching, journal)
    rows = make_row_store(prepared.sizes.row_store)
    encoder = encoders.make_encoder_cache(worker, pool, config.page_size)
    step, groups = config.step_tokens, worker.kv_cache_layout.groups
    return KVCacheManager(pool, config.page_size, groups, step, slots, rows, encoder)


def _run_first_requests(prepared: EnginePlan, batches: BatchBuilder, runner: StepRunner) -> None:
    """Runs the first requests: for scales of K and V, and to compile kernels that are compiled when they are called.

    Their engine has bookkeeping and a sampler of its own: what it counts, caches and draws is dropped."""
    config, longest = prepared.config, prepared.memory_plan.max_model_len
    warms_up = config.warm_up and prepared.capabilities.compiles_late
    if not (warms_up or config.calculate_kv_scales):
        return
    if prepared.pooling is None:  # code of the user's sees requests of users alone
        runner = _generation_runner(prepared, batches, _sampler(prepared, processors=()))
    scheduler = Scheduler(scheduler_limits(config, prepared.memory_plan), _kv_cache_manager(prepared, caching=False))
    engine = Engine(EngineParts(scheduler, runner, prepared.capabilities.overlap))
    if config.calculate_kv_scales:
        calibrate(engine, prepared.ranks, prepared.vocab_size, longest)
    if warms_up:
        warm_up(engine, prepared.vocab_size, longest, prepared.pooling_bounds)
        if config.enable_lora:
            with batches.with_adapters_always():
                warm_up(engine, prepared.vocab_size, longest, prepared.pooling_bounds)


def _runner(prepared: EnginePlan, batches: BatchBuilder) -> StepRunner:
    """Returns the runner: it samples tokens, or pools hidden states."""
    if prepared.pooling is None:
        return _generation_runner(prepared, batches, _sampler(prepared), prepared.profiler.spans)
    config, ranks = prepared.config, prepared.ranks
    files = None if config.load_format == "dummy" else weights_for(config, prepared.folder, prepared.capabilities)
    pooler = make_pooler(prepared.pooling, files, prepared.hf_config, prepared.folder)
    runner = PoolingRunner(ranks, batches, pooler, prepared.profiler.spans, _step_agreement(ranks))
    return _pipeline_runner(prepared, runner)


def _generation_runner(
    prepared: EnginePlan, batches: BatchBuilder, sampler: Sampler, spans: Spans | None = None
) -> StepRunner:
    ranks, overlap = prepared.ranks, prepared.capabilities.overlap
    agreement, encoder = _step_agreement(ranks), prepared.encoder
    if isinstance(encoder, SpeechInput) and encoder.aligns:  # such models have no pipeline stages
        aligner = encoders.make_aligner(prepared.folder, prepared.hf_config, ranks)
        return SpeechModelRunner(aligner, sampler, batches, overlap, spans, agreement)
    return _pipeline_runner(prepared, ModelRunner(ranks, sampler, batches, overlap, spans, agreement))


def _pipeline_runner(prepared: EnginePlan, runner: StepRunner) -> StepRunner:
    """Returns the runner of this rank's pipeline stage, where there are several."""
    pipe = prepared.ranks.workers[0].comm.stage_channel
    return runner if pipe is None else PipelineRunner(runner, prepared.ranks, pipe)


def _step_agreement(ranks: WorkerGroup) -> StepAgreement | None:
    return None if ranks.channel is None else StepAgreement(ranks.channel)


def _sampler(prepared: EnginePlan, processors: Sequence[Any] | None = None) -> Sampler:
    """With these logits processors, or those of the settings. Where they cannot read what the device holds, sampling is
    left to the host and the specification."""
    config, facts, first = prepared.config, prepared.capabilities, prepared.ranks.workers[0]
    rules = encoders.decoding_rules(prepared.folder, prepared.hf_config, first)
    classes = load_processors(config.logits_processors if processors is None else processors)
    ops, device = first.ops, first.device
    if classes and facts.ops_only:
        names = ", ".join(each.__name__ for each in classes)
        logger.warning("sampling on the host: %s computes with torch, which cannot on what this device holds", names)
        ops, device = bind({}), HostSampling()
    settled = config.replace(max_model_len=prepared.memory_plan.max_model_len)
    made = [each.make(prepared.vocab_size, device, settled) for each in classes]
    sizes = logprob_sizes(prepared.vocab_size, config.max_logprobs) if facts.static_shapes else ()
    return Sampler(ops, device, prepared.vocab_size, made, config.logprobs_mode, sizes, rules)


def _op_table(prepared: EnginePlan) -> str:
    choices = prepared.ranks.workers[0].ops.bound
    special = [f"{each.op} -> {each.provider}" for each in choices if each.provider != "reference"]
    return ", ".join([*special, f"{len(choices) - len(special)} others -> reference"])
