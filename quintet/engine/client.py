"""The text side and the core of one engine in one process: what LLM and AsyncLLM are both made of."""

import functools
import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.chat.prompts import Prompt, parse_prompts
from quintet.chat.reasoning_tokens import ReasoningMarkers, find_parser, find_reasoning_markers
from quintet.common.imports import without_garbage_collection
from quintet.common.interrupts import DeferredSigint
from quintet.config import EngineConfig
from quintet.engine.data_parallel import local_engine_configs
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.lora.references import LoRAReferences
from quintet.engine.observability.request_stats import RequestStats, RequestTimer
from quintet.engine.output_processor import OutputProcessor
from quintet.engine.parallel.commands import SaveShardedCommand
from quintet.engine.parallel.eplb.balancer import ExpertBalancer
from quintet.engine.parallel.external_launcher import MirroredLeader
from quintet.engine.parallel.leader import Leader
from quintet.engine.request import CoreRequest
from quintet.engine.row_store.factory import max_embeds_rows
from quintet.engine.sampling.load_processors import load_processors
from quintet.engine.startup import launch, prepare
from quintet.hub.adapters import resolve_adapter
from quintet.hub.model_impl import read_model
from quintet.hub.resolve import resolve_config, resolve_model, resolve_tokenizer
from quintet.media.input import MediaInput
from quintet.model_loader.loader import fingerprint
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.sharded_state import SHARDS, copy_config_files
from quintet.model_loader.sharded_state import save as save_shard
from quintet.model_loader.weight_files import weights_of
from quintet.outputs import RequestOutput
from quintet.parsers import load_plugin
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.structured_output.grammar import GrammarCompiler
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from quintet.engine.data_parallel.engines import DataParallelEngines

logger = logging.getLogger(__name__)


# entries of a config.json that say how it was saved, not what is computed
_FILE_ONLY_KEYS = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


class EngineClient:
    """Takes requests as text or token ids, returns outputs as text; its caller calls step()."""

    engine: "Engine | DataParallelEngines"

    def __init__(self, config: EngineConfig, progress: bool = True) -> None:
        """ValueError, OSError or MemoryError says why it does not start."""
        several = len(local_engine_configs(config)) > 1
        with without_garbage_collection():  # transformers may be imported, and a vocabulary read
            prepared = prepare(config, met=not several)
        self.config: EngineConfig = prepared.config
        self.engine_plan: EnginePlan = prepared
        self.reload_format = ""  # of reload_weights(), where it is another than the start's
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(Path(resolve_tokenizer(config, prepared.folder)))
            if prepared.pooling_bounds is not None:
                self.tokenizer.for_pooling(prepared.pooling_bounds.lowercase)
        self.grammars = GrammarCompiler(
            lambda: self.tokenizer,
            prepared.vocab_size,
            _eos_ids(prepared, self.tokenizer),
            prepared.config.structured_outputs_config,
        )
        if several:  # imported where it is used: one engine in this process needs no ZeroMQ
            from quintet.engine.data_parallel.engines import DataParallelEngines, per_engine_config

            self.engine = DataParallelEngines(per_engine_config(config, prepared.config))
            prepared = self.engine_plan = self.engine.limit_plan(prepared)
        else:
            self.engine = launch(prepared, progress, self.grammars)
        self.input_processor = _input_processor(prepared, self.tokenizer, self.grammars)
        lora = self.engine.lora if isinstance(self.engine, Engine) else None
        agree = self.engine.agree_on_files if isinstance(self.engine, MirroredLeader) else None
        self.adapters = LoRAReferences(config, self._adapter_folder, lora, agree)
        self.output_processor = OutputProcessor(self.tokenizer, prepared.config.stream_interval)
        self.request_stats = RequestStats()
        self._timers: dict[str, RequestTimer] = {}
        self._ids = itertools.count()
        self.media = prepared.taken_media

    def _adapter_folder(self, path: str) -> Path:
        return resolve_adapter(path, self.config)

    @property
    def vocab_size(self) -> int:
        return self.input_processor.limits.vocab_size

    @property
    def family(self) -> str:
        """The model's type, as its config.json names it."""
        return str(self.engine_plan.hf_config.model_type)

    @property
    def busy(self) -> bool:
        """True if step() has anything to do."""
        return self.engine.busy

    def next_id(self) -> str:
        """A request id that this client has not given before."""
        return str(next(self._ids))

    def parse(self, prompts: Any) -> list[Prompt]:
        """One prompt or a list of them, in any form; ValueError says which is wrong, and why."""
        bounds = self.input_processor.limits
        return parse_prompts(prompts, self.tokenizer, bounds.vocab_size, bounds.embeds_width, self.media)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Ahead of add(), which would have its thread wait for it. ValueError as there."""
        if params.structured_outputs is not None:
            bounds = self.input_processor.limits
            params.check(bounds.vocab_size, bounds.max_model_len, bounds.max_logprobs)
            self.grammars.compile_and_wait(params.structured_outputs)

    def add(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int = 0,
        settled: bool = False,
    ) -> None:  # fmt: skip
        """Admits and queues a request; ValueError says what is wrong, and then nothing was queued. `settled`: pooling
        parameters that PoolingBounds.params() returned, and that do not change any more."""
        self.engine.check_awake()
        requests = self.input_processor.admit(request_id, prompt, params, priority, settled)
        self._queue(request_id, prompt, requests[0].params if isinstance(params, PoolingParams) else params, requests)

    def _queue(self, request_id: str, prompt: Prompt, params: SamplingParams, requests: Sequence[CoreRequest]) -> None:
        self.output_processor.add(request_id, params, requests[0].prompt_ids, prompt)
        self._timers[request_id] = RequestTimer(self.request_stats, params)
        for request in requests:
            self.engine.add(request)

    def step(self) -> list[RequestOutput]:
        """One engine step -> the outputs that it moved; a found stop string ends its request here."""
        self.engine.compute()
        with DeferredSigint():
            return self.collect()

    def collect(self) -> list[RequestOutput]:
        """The outputs that the engine's last compute() moved. Not to be interrupted."""
        deltas = self.engine.take_deltas()
        processed = self.output_processor.process(deltas)
        if self.engine.profiler.spans.events is not None:
            self.engine.profiler.spans.lap("detokenize", deltas)
        self.engine.abort(processed.aborts)
        return self._counted(processed.outputs)

    def _counted(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs:
            watch = self._timers.get(output.request_id)  # there is none if Ctrl-C came while it was added
            if watch is not None:
                watch.record(output)
                if output.finished:
                    del self._timers[output.request_id]
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Ends requests; their last outputs say "abort". Unknown ids are passed over."""
        processed = self.output_processor.abort(dict.fromkeys(request_ids))
        self.engine.abort(processed.aborts)
        return self._counted(processed.outputs)

    def metrics(self) -> dict[str, float]:
        """Engine.Stats, those that are one number each."""
        return self.engine.stats().numbers()

    def reload_weights(self, path: str | None = None) -> None:
        """See LLM.reload_weights."""
        if self.config.load_format in SHARDED:
            asked = f"with load_format={self.config.load_format!r}"
            raise ValueError(f"{asked} weights are not reloaded; start an engine on the others")
        folder = self.engine_plan.folder if path is None else self._checked_folder(path)
        config = self.config.replace(load_format=self.reload_format or self.config.load_format)
        self.engine.reload_weights(None if config.load_format == "dummy" else weights_of(config, folder))

    def save_sharded_state(self, path: str) -> None:
        """See LLM.save_sharded_state."""
        self.engine.check_awake()
        if self.engine_plan.encoder is not None:
            raise ValueError("save_sharded_state: an encoder's weights have no shards; use the model's own files")
        if not isinstance(self.engine, Engine):
            raise ValueError("save_sharded_state: several engines hold the same weights; start one, and have it write")
        placing, original, folder = (
            self.engine_plan.capabilities.layout_key,
            self.engine_plan.folder,
            Path(path).expanduser(),
        )
        if not placing:
            raise ValueError("save_sharded_state: this device's weights do not lie in the host's memory")
        if original.is_file() or folder.resolve() == original.resolve():
            raise ValueError(f"save_sharded_state: {original} is a GGUF file or the folder itself; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(SHARDS):
            stale.unlink()
        save = functools.partial(save_shards, self.engine_plan, folder)
        if isinstance(self.engine, Leader):
            self.engine.run_collective(SaveShardedCommand(str(folder)), save)
        else:
            save()
        copy_config_files(original, folder)

    def _checked_folder(self, model: str) -> Path:
        """ValueError if it is another model than the one that runs, by its config.json."""
        folder = resolve_model(self.config.replace(model=model))
        ignored = {*_FILE_ONLY_KEYS}
        if self.config.ec_transfer_config.is_producer_alone:  # it has the first layers alone
            ignored |= {"num_hidden_layers", "layer_types"}
        ours, other = (
            {name: value for name, value in each.get_text_config().to_dict().items() if name not in ignored}
            for each in (self.engine_plan.hf_config, self._weights_config(folder))
        )
        differs = sorted(name for name in {*ours, *other} if ours.get(name) != other.get(name))
        if differs:
            raise ValueError(
                f"{folder} is another model than the one that runs: its config.json differs in {', '.join(differs)}; "
                "start an engine on it"
            )
        return folder

    def _weights_config(self, folder: Path) -> Any:
        place = resolve_config(self.config, folder)
        return read_model(self.config, place, self.engine_plan.platform.models)[0]

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends the sleep. `tags`: of what, as Engine.wake_up() has them; all if None."""
        self.engine.wake_up(tags)

    def close(self) -> None:
        """Ends what runs, and lets go of threads; the memory goes with the object."""
        self.engine.abort(self.output_processor.fail("the engine was closed").aborts)
        self.engine.close()
        self.adapters.close()
        if isinstance(self.media, MediaInput):
            self.media.close()
        self.grammars.close()
        self.engine_plan.ranks.close()


def save_shards(prepared: EnginePlan, folder: Path) -> None:
    """Saves shards of the ranks in this process. Moved experts go back first: readers expect their first places."""
    if prepared.config.enable_eplb:
        ExpertBalancer(prepared.config.eplb_config, prepared.ranks).restore_placement()
    placing = prepared.capabilities.layout_key
    prepared.ranks.map_workers(
        lambda worker: save_shard(
            worker.model, folder, worker.rank_info.rank, fingerprint(worker.model, worker.platform, placing)
        )
    )


def _eos_ids(prepared: EnginePlan, tokenizer: Tokenizer | None) -> frozenset[int]:
    return frozenset(prepared.generation.get("eos_token_id", ())) | frozenset(tokenizer.eos_ids if tokenizer else ())


def _input_processor(prepared: EnginePlan, tokenizer: Tokenizer | None, grammars: GrammarCompiler) -> InputProcessor:
    config, generation = prepared.config, dict(prepared.generation)
    generation.pop("eos_token_id", None)
    bounds = ModelLimits(
        prepared.vocab_size,
        prepared.memory_plan.max_model_len,
        config.max_logprobs,
        prepared.embeds_width,
        config.scheduling_policy == "priority",
        None if prepared.pooling_bounds is None else prepared.pooling_bounds.with_special_tokens(tokenizer),
        config.kv_transfer_config.kv_role,
        max_embeds_rows(config, prepared.sizes.row_store),
        prepared.encoder,
        whole_runs=prepared.served_media.whole_runs,
        max_prefix=0 if prepared.media is None else prepared.media.max_prefix,
    )
    if tokenizer is None:
        generation["detokenize"] = False
    processors = load_processors(config.logits_processors)
    eos = _eos_ids(prepared, tokenizer)
    thoughts = functools.cache(lambda: _reasoning_markers(prepared, tokenizer))
    return InputProcessor(
        bounds, tokenizer, eos, config.seed, processors, generation, grammars=grammars, reasoning_markers=thoughts
    )


def _reasoning_markers(prepared: EnginePlan, tokenizer: Tokenizer | None) -> ReasoningMarkers | str:
    structured, family = prepared.config.structured_outputs_config, str(prepared.hf_config.model_type)
    if structured.reasoning_parser_plugin is not None:
        load_plugin(structured.reasoning_parser_plugin)
    templates = "" if tokenizer is None else tokenizer.templates
    parser = find_parser(structured.reasoning_parser, templates, family, tokenizer)
    return find_reasoning_markers(tokenizer, parser, prepared.config.reasoning_config)
