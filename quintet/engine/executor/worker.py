"""One rank: a device, its share of the model, the cache, and the step that runs them."""

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.executor.mixers import kv_heads, planning_mixer
from quintet.engine.kv_cache.groups import KVCacheLayout, group_layers
from quintet.engine.kv_cache.state_slots import SLOTS_PER_REQUEST
from quintet.engine.sleep import TAGS
from quintet.interface.platform import DROPPED, Mixer, Platform, State
from quintet.interface.types import (
    AttentionSpec,
    Batch,
    Estimate,
    HostBatch,
    IntArray,
    Layout,
    MaxShape,
    Memory,
    Outputs,
    RankInfo,
    ShapeBucket,
    StateSpec,
    leaves,
)
from quintet.layers.build import BuildContext, KVScaling, RequestedOutputs, finalize, replacements
from quintet.layers.decoder import ModelBase
from quintet.layers.layer_state import LayerMixer
from quintet.layers.lora import LoRAPools, adaptable_modules
from quintet.layers.lora_step import LoRASizes, LoRAStep
from quintet.layers.moe.expert_placement import ExpertPlacement
from quintet.layers.pipeline import Stage, layer_mixers_of, layers_per_stage
from quintet.layers.quantization import QuantizationPlan
from quintet.model_loader.incoming import Incoming
from quintet.model_loader.loader import ParameterLoad, declared_weights, distinct_parameters, load, num_bytes
from quintet.model_loader.weight_files import WeightFiles
from quintet.model_loader.weights_cache import CacheEntry, StoreThread
from quintet.models import model_class
from quintet.ops import bind
from quintet.ops.registry import Instrument

logger = logging.getLogger(__name__)

RANK_ZERO = RankInfo()


@dataclass(frozen=True)
class ModelSizes:
    """Settings that a worker builds its model with, beside the checkpoint's own configuration."""

    dtype: torch.dtype
    page_size: int
    max_model_len: int
    quantization: QuantizationPlan = QuantizationPlan()  # of the weights of products
    kv_dtype: torch.dtype | None = None  # of the cache; None: dtype
    kv_scales: KVScaling = field(default_factory=KVScaling)
    requested_outputs: RequestedOutputs = RequestedOutputs()
    causal: bool = True  # False: tokens of a decoder see those after them
    attention: str = "auto"  # the provider of paged attention that was asked for
    transformers_backend: bool = False  # the model runs by transformers' own code
    ignored_tensors: tuple[str, ...] = ()  # patterns of tensors that the model does not load: pooling heads
    tied_head: bool | None = None  # the head is the token embedding, by the files; None: as config.json has it
    expert_placement: ExpertPlacement | None = None  # of whole experts to ranks; None: each is cut
    weights_cache: CacheEntry | None = None  # where placed weights are kept between starts
    lora: LoRASizes | None = None  # room for adapters; None: the model takes none


class MemoryRoom(NamedTuple):
    """Units of the cache; the first of each takes the writes of padding."""

    pages: int
    slots: int = 1 + SLOTS_PER_REQUEST  # of states, where layers keep some


class PreviousTokens(NamedTuple):
    """Tokens of a step that the step before it samples: the host does not know them yet."""

    sampled: Tensor  # [S] int32, on the first rank's device
    rows: IntArray  # [T] int32: which of those each token is, -1 if the host knows it


class Worker:
    """Built empty, so that the memory plan can ask for sizes; load() then fills it."""

    def __init__(
        self,
        platform: Platform,
        hf_config: Any,
        sizes: ModelSizes,
        rank_info: RankInfo = RANK_ZERO,
        timed: Instrument | None = None,
    ) -> None:
        """`timed` wraps the ops."""
        self.platform, self.rank_info = platform, rank_info
        self.device = platform.open(rank_info.rank)
        self.comm = platform.connect(rank_info)
        asked = {} if sizes.attention == "auto" else {"paged_attention": sizes.attention}
        self.ops = bind(platform.op_priority, asked, timed)
        if rank_info.stages > 1 and rank_info.endpoint and self.comm.stage_channel is None:
            raise ValueError(
                f"pipeline_parallel_size must be 1 on platform {platform.name}, whose communicator has no pipe between "
                "stages; share each layer out (tensor_parallel_size)"
            )
        self.build(hf_config, sizes)
        self._state: State = ()
        self.incoming: Incoming | None = None  # tensors of an update of the weights that has begun

    def build(self, hf_config: Any, sizes: ModelSizes) -> None:
        """Makes the model without its weights; again, if the plan settles on another length."""
        mixings: list[LayerMixer] = []

        def mixing(spec: AttentionSpec | StateSpec) -> LayerMixer:
            if isinstance(spec, StateSpec) and not self.platform.supports_states:
                raise ValueError(
                    f"platform {self.platform.name} keeps pages alone (supports_states is False), and layers of "
                    f"{hf_config.model_type} keep a state per request ({spec.op}); run this model on another platform"
                )
            self._check_supported(spec, hf_config.model_type)
            mixings.append(LayerMixer(self.platform.mixer(spec, self.ops, self.rank_info.rank)))
            return mixings[-1]

        build = BuildContext(
            ops=self.ops,
            make_mixer=mixing,
            comm=self.comm,
            dtype=sizes.dtype,
            page_size=sizes.page_size,
            max_model_len=sizes.max_model_len,
            quantization=sizes.quantization,
            kv_dtype=sizes.kv_dtype,
            kv_scales=sizes.kv_scales,
            requested_outputs=sizes.requested_outputs,
            causal=sizes.causal,
            tied_head=sizes.tied_head,
            expert_placement=sizes.expert_placement,
            stage=self._stage_of(hf_config),
            layers=replacements(self.platform.layers),
            lora=None if sizes.lora is None else LoRAStep(),
        )
        self._cache, self._dtype = sizes.weights_cache, sizes.dtype
        self._storing: StoreThread | None = None  # puts the weights into an automatic cache
        self._width = getattr(hf_config, "hidden_size", 0)  # of what stages hand on
        self.model: ModelBase = model_class(hf_config, self.platform.models, sizes.transformers_backend)(
            hf_config, build
        ).eval()
        if not sizes.requested_outputs.logits:
            self.model.drop_lm_head()
            self.model.ignored_tensors = (*self.model.ignored_tensors, *sizes.ignored_tensors)
        self.model.ignored_suffixes = (
            sizes.quantization.checkpoint.ignored_suffixes if sizes.quantization.checkpoint else ()
        )
        finalize(self.model)
        self.stage = build.stage
        modules = adaptable_modules(self.model) if sizes.lora is not None else frozenset()
        here = self._keep(mixings) if self.rank_info.stages > 1 else mixings
        self.lora = None if sizes.lora is None else LoRAPools(self.model, build, sizes.lora, modules)
        self.kv_cache_layout: KVCacheLayout = group_layers(mixings, here)
        self.kv_heads = kv_heads(here, len(self.kv_cache_layout.layouts))  # on all ranks, of each layout of pages
        self._planners = [
            planning_mixer([m for m in mixings if m.group == index]) for index in self.kv_cache_layout.indices
        ]
        self._plans = any(type(mixer).plan is not Mixer.plan for mixer in self._planners)

    def _stage_of(self, hf_config: Any) -> Stage:
        """Returns the pipeline stage of this rank: its layers."""
        stages = self.rank_info.stages
        if stages == 1:
            return Stage()
        return Stage(self.rank_info.stage, layers_per_stage(hf_config.num_hidden_layers, stages))

    def _keep(self, mixings: Sequence[LayerMixer]) -> Collection[LayerMixer]:
        """Leaves in the model what this stage has of it -> those of its layers' mixings."""
        trunk, stage = self.model.pipeline_trunk(), self.stage
        assert len(trunk.blocks) == sum(stage.counts), "num_hidden_layers says how many layers there are"
        assert layer_mixers_of(trunk.blocks) >= set(mixings), "each mixing is one layer's"
        self.model.other_stage_tensors = frozenset(
            name for each in declared_weights(self.model) for name in each.weight.stored_on_all_ranks
        )
        if not stage.last and hasattr(self.model, "lm_head"):
            self.model.drop_lm_head()
        trunk.keep_stage(stage)
        self._reads = () if stage.first else self.model.shared_tensor_widths(stage.start)
        return layer_mixers_of(trunk.blocks)

    def _check_supported(self, spec: AttentionSpec | StateSpec, family: str) -> None:
        """ValueError where a layer has what the platform's attention does not know of."""
        if (
            isinstance(spec, AttentionSpec)
            and spec.chunk is not None
            and "chunk" not in self.platform.optional_spec_fields
        ):
            raise ValueError(
                f"platform {self.platform.name} has no attention within chunks, and layers of {family} see chunks of "
                f"{spec.chunk} tokens; run this model on another platform"
            )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the tensors of the state."""
        return self.kv_cache_layout.layouts + self.kv_cache_layout.states

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, the same for every group."""
        return self.kv_cache_layout.page_bytes

    @property
    def weight_bytes(self) -> int:
        return num_bytes(self.model, self.platform) + self._pool_bytes

    @property
    def _pool_bytes(self) -> int:
        return 0 if self.lora is None else self.lora.nbytes

    def estimate(self, max_shape: MaxShape) -> Estimate:
        """Estimates the memory that the model takes on this device."""
        found = self.platform.estimate(self.model, distinct_parameters(self.model), max_shape)
        return found._replace(weights=found.weights + self._pool_bytes)

    def memory(self) -> Memory:
        return self.device.memory()

    def load(
        self,
        folder: Path | WeightFiles | None,
        room: MemoryRoom | int,
        buckets: Sequence[ShapeBucket],
        progress: bool,
        ahead: Sequence[ShapeBucket] = (),
    ) -> None:
        """Reads the weights (random ones without a folder), makes the cache, compiles the step, and runs those of
        `ahead` so that they are captured."""
        self._room = room if isinstance(room, MemoryRoom) else MemoryRoom(room)
        self._folder, self._variants, self._ahead = folder, buckets, ahead
        self._read(progress)
        self._begin(progress)

    def _read(self, progress: bool) -> None:
        """The weights, from the checkpoint as it is now."""
        self.finish_store()
        self._storing = load(self.model, self.platform, self._folder, progress, self.rank_info.rank, self._cache)
        if self.lora is not None:
            self.lora.place(self.platform)
        self._empty = False

    def finish_store(self) -> None:
        """Waits until the weights are in the cache: they are about to change, or to go."""
        if self._storing is not None:
            self._storing.close()
            self._storing = None

    def _begin(self, progress: bool) -> None:
        """Makes the cache, compiles the step, and captures."""
        self.recreate_cache()
        shown, hidden = self._variants, not (progress and self._variants)
        self._step = self._whole = self.platform.compile(
            self.model, tqdm(shown, desc="Compiling", unit="size", disable=hidden, leave=False)
        )
        if self._ahead:
            self._capture(progress)

    @torch.inference_mode()
    def _capture(self, progress: bool) -> None:
        before, start = self.memory().free, time.perf_counter()
        for bucket in tqdm(self._ahead, desc="Capturing", unit="step", disable=not progress, leave=False):
            outputs = self.run(bucket.batch)
            for each in leaves(outputs):
                self.device.to_host(each)()  # waits for it
        took, seconds = max(0, before - self.memory().free), time.perf_counter() - start
        logger.info("captured %d steps ahead in %.1f s: %.1f MiB", len(self._ahead), seconds, took / 2**20)

    def sleep(self, level: int) -> int:
        """Gives memory back -> bytes; until wake() nothing may be asked of this worker."""
        self.finish_store()
        freed = self.device.sleep(level)  # refuses before anything is let go
        freed += sum(_storage_bytes(self._state).values())
        self._step, self._whole, self._state = _asleep_step, _asleep_step, ()  # a recorded step holds addresses
        if level == DROPPED:
            freed += self._drop_weights()
        return freed

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Restores the state after load(); reads dropped weights again. After an error it may be repeated."""
        if "weights" in tags:
            self.device.wake()
            if self._empty:
                self._read(progress=False)
        if "kv_cache" in tags:
            self._begin(progress=False)

    def reload(self, folder: Path | WeightFiles | None) -> None:
        """Overwrites the weights with others of the same model: no step is compiled anew.

        ValueError if they do not fit, and then nothing has changed. After a later error it may be repeated.
        """
        reading, step = ParameterLoad(self.model, folder), self._whole
        self._step = _failed_reload_step
        self.finish_store()
        reading.overwrite(self.platform)
        self._step, self._folder = step, folder

    def _drop_weights(self) -> int:
        """-> the bytes that they still took."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        held = _storage_bytes(tensors)
        for tensor in tensors:
            tensor.data = tensor.new_empty(0)
        self._empty = True
        return sum(held.values())

    def allow_recorded(self, wanted: bool) -> None:
        """Sets whether recorded or captured steps may run. A replayed step skips Python code, such as looking at
        numbers, so code that needs it switches them off."""
        self._step = self._whole if wanted else torch.inference_mode()(self.model)

    def recreate_cache(self) -> None:
        """An empty cache, once the one before is let go."""
        self._state = ()
        made, arrangement = self._room, self.kv_cache_layout
        self._state = self.device.allocate(arrangement.layouts, made.pages)
        if arrangement.states:
            self._state += self.device.allocate(arrangement.states, made.slots)

    def run(self, host: HostBatch, carried: PreviousTokens | None = None) -> Outputs:
        """One step -> what it gives, on the device."""
        if not self._state and self.layouts:  # an interruption came between the old cache and the new one
            self.recreate_cache()
        if self._plans:
            host = self._with_plans(host)
        arrays = host.leaves()
        if carried is not None:
            rows = np.full(len(host.token_ids), -1, np.int32)  # the step may have been padded
            rows[: len(carried.rows)] = carried.rows
            arrays.append(rows)
        tensors = self.device.to_device(arrays)
        batch = host.on(tensors)
        if carried is not None:
            sampled = self._broadcast_from_first(carried.sampled)
            batch = batch._replace(token_ids=self.ops.place_tokens(batch.token_ids, sampled, tensors[-1]))
        if not self.stage.first:
            handed, beside = self._handed(len(host.token_ids))
            batch = batch._replace(inputs=batch.inputs._replace(intermediate_tensors=handed, shared_tensors=beside))
        outputs, self._state = self._step(self._state, batch)
        if not self.stage.last:
            assert self.comm.stage_channel is not None
            self.comm.stage_channel.send(outputs.intermediate_tensors)
        return outputs

    def _handed(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs of the pipeline stage before, as [N, T, H] bytes, and the bytes of what is beside."""
        assert self.comm.stage_channel is not None
        given, size = self.comm.stage_channel.receive(), self._dtype.itemsize
        first = len(given) - tokens * sum(self._reads) * size
        return given[:first].view(-1, tokens, self._width * size), given[first:] if self._reads else None

    def _with_plans(self, host: HostBatch) -> HostBatch:
        """Returns the batch with the plan of each group's mixer."""
        planned = zip(self._planners, host.groups, strict=True)
        groups = tuple([group._replace(plan=mixer.plan(host, group)) for mixer, group in planned])
        return host._replace(groups=groups)

    def _broadcast_from_first(self, x: Tensor) -> Tensor:
        """The first rank's x [S], on every rank; what the other ranks bring follows it."""
        if self.comm.size == 1:
            return x
        own = x if self.comm.rank == 0 else self.upload(np.zeros(x.shape[0], np.int32))[0]
        return self.comm.all_gather(own, 0)

    def upload(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return self.device.to_device(arrays)


def _storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each piece of memory, however many tensors lie on it."""
    return {memory.data_ptr(): memory.nbytes() for memory in (tensor.untyped_storage() for tensor in tensors)}


def _failed_reload_step(state: State, batch: Batch) -> tuple[Outputs, State]:
    """Step of a worker after reload() failed and left its weights partly replaced."""
    raise RuntimeError("the weights were replaced in part, and that failed; call reload_weights() again")


def _asleep_step(state: State, batch: Batch) -> tuple[Outputs, State]:
    """The step of a worker that sleeps."""
    raise RuntimeError("a step was asked of a worker that is asleep")
