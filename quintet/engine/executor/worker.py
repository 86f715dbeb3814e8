"""One rank: a device, its share of the model, the cache, and the step that runs them."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.executor.media_parts import encoder_buckets, make_tower, reload_parts
from quintet.engine.executor.mixers import keep_drafts_apart, kv_heads, mixer_of
from quintet.engine.executor.model_part import ModelPart, ModelSizes, storage_bytes
from quintet.engine.kv_cache.groups import KVCacheLayout, group_layers
from quintet.engine.kv_cache.state_slots import SLOTS_PER_REQUEST
from quintet.engine.sleep import TAGS
from quintet.interface.platform import DROPPED, Platform, State
from quintet.interface.types import (
    Estimate,
    HostBatch,
    IntArray,
    LayerSpec,
    Layout,
    MaxShape,
    Outputs,
    RankInfo,
    ShapeBucket,
    leaves,
)
from quintet.layers.build import BuildContext, replacements
from quintet.layers.decoder import CausalLM, ModelBase
from quintet.layers.layer_state import LayerMixer
from quintet.layers.lora_step import LoRAStep
from quintet.layers.moe.routed_experts import RoutedExperts
from quintet.layers.pipeline import Stage, layer_mixers_of, layers_per_stage
from quintet.layers.row_store import RowStore
from quintet.model_loader.incoming_parts import IncomingParts
from quintet.model_loader.loader import declared_weights
from quintet.model_loader.weight_files import WeightFiles
from quintet.models.draft_heads.base import DraftHead
from quintet.models.encoders.base import CrossEncoder, encoder_shape
from quintet.ops import bind
from quintet.ops.registry import Instrument

logger = logging.getLogger(__name__)

RANK_ZERO = RankInfo()


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
        self._given: tuple[Tensor, ...] | None = None  # hidden states of the last step, where a draft head reads them
        self._given_by_model = True  # and not by the head itself
        self.incoming: IncomingParts | None = None  # tensors of an update of the weights that has begun

    def build(self, hf_config: Any, sizes: ModelSizes) -> None:
        """Makes the models without their weights; again, if the plan settles on another length."""
        self._dtype = sizes.dtype
        self._width = getattr(hf_config, "hidden_size", 0)  # of what stages hand on
        self.main = self._part(hf_config, sizes)
        self.stage = self.main.build.stage
        max_drafts = keep_drafts_apart(self, sizes.max_drafts)
        here = self._keep(self.main.mixers) if self.rank_info.stages > 1 else self.main.mixers
        self.encoder = self._encoder_part(hf_config, sizes)
        self.drafter: ModelPart | None = None
        if sizes.drafter is not None:
            self.drafter = self._part(sizes.drafter.hf_config, sizes.drafter.sizes, sizes.drafter.family)
            if isinstance(self.drafter.model, DraftHead):
                self.drafter.model.borrow(cast(CausalLM, self.main.model))
            here = [*here, *(each for each in self.drafter.mixers if each.source is None)]
        self.parts = tuple(part for part in (self.main, self.encoder, self.drafter) if part is not None)
        self._drafter_weights = None if sizes.drafter is None else sizes.drafter.weights
        every = [mixer for part in self.parts for mixer in part.mixers]
        mixers = [each for each in every if each.source is None]
        rows = 0 if self.encoder is None else cast(CrossEncoder, self.encoder.model).rows
        self.kv_cache_layout: KVCacheLayout = replace(group_layers(mixers, here, rows), max_drafts=max_drafts)
        self.kv_heads = kv_heads(here, len(self.kv_cache_layout.layouts))  # on all ranks, of each layout of pages
        for mixer in every:
            mixer.settle()
        for part in self.parts:
            part.settle(self.kv_cache_layout.indices, mixers)
        self.model, self.lora, self.row_store = self.main.model, self.main.lora, self.main.row_store
        self.tower = make_tower(self, sizes)
        self.encoder_buckets = encoder_buckets(self)

    def _encoder_part(self, hf_config: Any, sizes: ModelSizes) -> ModelPart | None:
        """Makes the encoder whose rows the model's layers read, if there is one."""
        if self.main.model.encoder_class is None:
            return None
        made = self._part(hf_config, replace(sizes, lora=None, row_store=None), self.main.model.encoder_class)
        cast(CrossEncoder, made.model).borrow(self.main.model.cross_mixers)
        return made

    def _part(self, hf_config: Any, sizes: ModelSizes, head: type[ModelBase] | None = None) -> ModelPart:
        """Makes one of the models."""
        mixers: list[LayerMixer] = []

        def make_mixer(spec: LayerSpec) -> LayerMixer:
            mixers.append(LayerMixer(mixer_of(self, spec, hf_config.model_type), spec))
            return mixers[-1]

        build = BuildContext(
            ops=self.ops,
            make_mixer=make_mixer,
            comm=self.comm,
            dtype=sizes.dtype,
            page_size=sizes.page_size,
            max_model_len=sizes.max_model_len,
            quantization=sizes.quantization,
            kv_dtype=sizes.kv_dtype,
            kv_scales=sizes.kv_scales,
            requested_outputs=sizes.requested_outputs,
            causal=sizes.causal,
            whole_prompts=sizes.row_store is not None and sizes.row_store.whole_prompts,
            tied_head=sizes.tied_head,
            expert_placement=sizes.expert_placement,
            routed_experts=RoutedExperts() if sizes.requested_outputs.routed_experts else None,
            stage=self._stage_of(hf_config),
            layers=replacements(self.platform.layers),
            lora=None if sizes.lora is None else LoRAStep(),
            row_store=RowStore.make(sizes.row_store, sizes.dtype, self.rank_info, self.comm.rank),
        )
        made = ModelPart(self.platform, hf_config, build, sizes, mixers, head)
        made.rank = self.rank_info.rank
        return made

    def _stage_of(self, hf_config: Any) -> Stage:
        """Returns the pipeline stage of this rank: its layers."""
        stages = self.rank_info.stages
        if stages == 1:
            return Stage()
        return Stage(self.rank_info.stage, layers_per_stage(hf_config.num_hidden_layers, stages))

    def _keep(self, mixings: Sequence[LayerMixer]) -> Collection[LayerMixer]:
        """Leaves in the model what this stage has of it -> those of its layers' mixings."""
        trunk, stage = self.main.model.pipeline_trunk(), self.stage
        assert len(trunk.blocks) == sum(stage.counts), "num_hidden_layers says how many layers there are"
        assert layer_mixers_of(trunk.blocks) >= set(mixings), "each mixing is one layer's"
        self.main.model.other_stage_tensors = frozenset(
            name for each in declared_weights(self.main.model) for name in each.weight.stored_on_all_ranks
        )
        if not stage.last and hasattr(self.main.model, "lm_head"):
            self.main.model.drop_lm_head()
        trunk.keep_stage(stage)
        self._reads = () if stage.first else self.main.model.shared_tensor_widths(stage.start)
        return layer_mixers_of(trunk.blocks)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts of the tensors of the state."""
        return self.kv_cache_layout.layouts + self.kv_cache_layout.states

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on this device."""
        return sum(part.weight_bytes for part in (*self.parts, self.tower) if part is not None)

    def estimate(self, max_shape: MaxShape) -> Estimate:
        """Estimates the memory that the models take on this device; they run in turns, in one workspace."""
        found = self.main.estimate(max_shape)
        for part in self.parts[1:]:
            second = part.estimate(max_shape if part is self.drafter else encoder_shape(part.model, max_shape))
            found = found._replace(
                weights=found.weights + second.weights,
                workspace=max(found.workspace, second.workspace),
                captured=found.captured + second.captured * (part is self.drafter),  # no pass is recorded
            )
        tower = 0 if self.tower is None else self.tower.weight_bytes
        return found._replace(weights=found.weights + tower)

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
        self._variants, self._ahead = buckets, ahead
        for part in self.parts:
            if part is not self.drafter:
                part.read(folder, progress)
        if self.drafter is not None:
            self.drafter.read(self._drafter_weights, progress)
        if self.tower is not None:
            self.tower.read(folder, progress)
        self._begin(progress)

    def finish_store(self) -> None:
        """Waits until the weights are in the cache: they are about to change, or to go."""
        for part in self.parts:
            part.finish_store()

    def _begin(self, progress: bool) -> None:
        """Makes the cache, compiles the steps, and captures."""
        self.recreate_cache()
        for part in self.parts:
            variants = self.encoder_buckets if part is self.encoder else self._variants
            hidden = not (progress and variants)
            part.compile(tqdm(variants, desc="Compiling", unit="size", disable=hidden, leave=False))
        if self._ahead:
            self._capture(progress)

    @torch.inference_mode()
    def _capture(self, progress: bool) -> None:
        before, start = self.device.memory().free, time.perf_counter()
        for bucket in tqdm(self._ahead, desc="Capturing", unit="step", disable=not progress, leave=False):
            outputs = self.run(bucket.batch)
            for each in leaves(outputs):
                self.device.to_host(each)()  # waits for it
        took, seconds = max(0, before - self.device.memory().free), time.perf_counter() - start
        logger.info("captured %d steps ahead in %.1f s: %.1f MiB", len(self._ahead), seconds, took / 2**20)

    def sleep(self, level: int) -> int:
        """Gives memory back -> bytes; until wake() nothing may be asked of this worker."""
        self.finish_store()
        freed = self.device.sleep(level)  # refuses before anything is let go
        freed += sum(storage_bytes(self._state).values())
        self._state = ()
        for part in self.parts:
            part.sleep()
            freed += part.drop_weights() if level == DROPPED else 0
        if self.tower is not None and level == DROPPED:
            freed += self.tower.drop_weights()
        return freed

    def wake(self, tags: Collection[str] = TAGS) -> None:
        """Restores the state after load(); reads dropped weights again. After an error it may be repeated."""
        if "weights" in tags:
            self.device.wake()
            for part in (*self.parts, self.tower):
                if part is not None:
                    part.wake()
        if "kv_cache" in tags:
            self._begin(progress=False)

    def reload(self, folder: Path | WeightFiles | None) -> None:
        """Overwrites the model's weights with others of the same model (see ModelPart); the drafter keeps its own."""
        reload_parts(self, folder)

    def recreate_cache(self) -> None:
        """An empty cache, once the one before is let go."""
        self._state = ()
        made, arrangement = self._room, self.kv_cache_layout
        self._state = self.device.allocate(arrangement.layouts, made.pages)
        if arrangement.states:
            self._state += self.device.allocate(arrangement.states, made.slots)

    def tensors_of(self, mixer: LayerMixer) -> State:
        """Returns the tensors of the state that a layer keeps its K and V in."""
        return tuple(self._state[place] for place in mixer.tensor_indices)

    def run(self, host: HostBatch, carried: PreviousTokens | None = None) -> Outputs:
        """One step of the model -> what it gives, on the device."""
        host = self._ready(host, self.main)
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
        outputs, self._state = self.main.step(self._state, batch)
        self._given, self._given_by_model = outputs.aux_hidden_states or None, True
        if not self.stage.last:
            assert self.comm.stage_channel is not None
            self.comm.stage_channel.send(outputs.intermediate_tensors)
        return outputs

    def run_pass(self, part: ModelPart, host: HostBatch) -> None:
        """Runs a step of another of its models, which gives nothing but what it writes to the cache."""
        host = self._ready(host, part)
        _, self._state = part.step(self._state, host.on(self.device.to_device(host.leaves())))

    def draft(self, host: HostBatch, rows: Sequence[int] | None = None) -> Outputs:
        """One step of the drafter -> what it gives, on the device. `rows` [T]: for a draft head, the row of the hidden
        states of each token, which the model's last step has given, or the head's own, if that ran last."""
        assert self.drafter is not None, "this worker has no drafter"
        host = self._ready(host, self.drafter)
        batch = host.on(self.device.to_device(host.leaves()))
        if rows is not None:
            wide = np.zeros(len(host.token_ids), np.int32)  # the step may have been padded
            wide[: len(rows)] = rows
            states = self._hidden_states(self.upload(wide)[0], batch.inputs.embed_indices)
            batch = batch._replace(inputs=batch.inputs._replace(intermediate_tensors=states[None].view(torch.uint8)))
        outputs, self._state = self.drafter.step(self._state, batch)
        self._given, self._given_by_model = None if outputs.hidden_states is None else (outputs.hidden_states,), False
        return outputs

    def _hidden_states(self, rows: Tensor, places: Tensor | None) -> Tensor:
        """Returns the hidden states of rows of the step that ran last, as the draft head reads them: [T, H]."""
        assert self.drafter is not None and self._given is not None, "no step has given hidden states"
        head = cast(DraftHead, self.drafter.model)
        taken = [self.ops.take_rows(each, rows) for each in self._given]
        if not self._given_by_model:
            return taken[0]
        states = taken[0]
        for each in taken[1:]:
            states = self.ops.beside(states, each)
        return head.combine(states, places)

    def _ready(self, host: HostBatch, part: ModelPart) -> HostBatch:
        """Returns a step's batch with its plans, once there is a cache."""
        if not self._state and self.layouts:  # an interruption came between the old cache and the new one
            self.recreate_cache()
        return part.with_plans(host)

    def _handed(self, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Returns the outputs of the pipeline stage before, as [N, T, H] bytes, and the bytes of what is beside."""
        assert self.comm.stage_channel is not None
        given, size = self.comm.stage_channel.receive(), self._dtype.itemsize
        first = len(given) - tokens * sum(self._reads) * size
        return given[:first].view(-1, tokens, self._width * size), given[first:] if self._reads else None

    def _broadcast_from_first(self, x: Tensor) -> Tensor:
        """The first rank's x [S], on every rank; what the other ranks bring follows it."""
        if self.comm.size == 1:
            return x
        own = x if self.comm.rank == 0 else self.upload(np.zeros(x.shape[0], np.int32))[0]
        return self.comm.all_gather(own, 0)

    def upload(self, *arrays: np.ndarray[Any, Any]) -> tuple[Tensor, ...]:
        return self.device.to_device(arrays)
