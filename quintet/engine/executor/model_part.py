"""A model of a worker: its layers, its weights, and its compiled step. A worker has one, or a drafter beside it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.interface.platform import Mixer, Platform, State
from quintet.interface.types import Batch, Estimate, HostBatch, IntArray, MaxShape, Outputs, ShapeBucket
from quintet.interface.weights import Weight
from quintet.layers.build import BuildContext, KVScaling, RequestedOutputs, finalize
from quintet.layers.decoder import ModelBase
from quintet.layers.layer_state import LayerMixer
from quintet.layers.lora import LoRAPools, adaptable_modules
from quintet.layers.lora_step import LoRASizes
from quintet.layers.moe.expert_placement import ExpertPlacement
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.row_store import RowStoreSizes
from quintet.model_loader.loader import (
    Checkpoint,
    ParameterLoad,
    RandomWeights,
    distinct_parameters,
    load,
    num_bytes,
)
from quintet.model_loader.weight_files import WeightFiles
from quintet.model_loader.weights_cache import CacheEntry, StoreThread
from quintet.models import model_class
from quintet.models.draft_heads.base import DraftHead
from quintet.models.encoders.base import CrossEncoder

if TYPE_CHECKING:  # it is built with transformers, which text alone does without
    from quintet.engine.executor.tower_part import TowerSizes

ModelFactory = Callable[[Any, BuildContext], ModelBase]  # (config, build) -> a model, its weights not read
RunStep = Callable[[State, Batch], tuple[Outputs, State]]


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
    row_store: RowStoreSizes | None = None  # room for rows in the places of tokens' embeddings; None: there are none
    drafter: "DrafterSizes | None" = None  # a second model, which proposes tokens
    tower: "TowerSizes | None" = None  # the encoder of media; None: there is none
    max_drafts: int = 0  # of a request in a step

    def with_length(self, max_model_len: int) -> "ModelSizes":
        """Returns the same for requests of so many tokens."""
        drafter = self.drafter
        if drafter is not None:
            length = min(max_model_len, drafter.sizes.max_model_len)
            drafter = replace(drafter, sizes=drafter.sizes.with_length(length))
        return replace(self, max_model_len=max_model_len, drafter=drafter)


@dataclass(frozen=True)
class DrafterSizes:
    """Settings of a model that proposes tokens to another one, whose pages hold its keys and values, too."""

    hf_config: Any
    sizes: ModelSizes  # dtype, page_size and max_model_len are the other model's
    weights: WeightFiles | None  # None: random ones
    head: "DraftHeadSizes | None" = None  # None: a model by itself

    @property
    def family(self) -> type[DraftHead] | None:
        """Class of a draft head."""
        return None if self.head is None else self.head.family


@dataclass(frozen=True)
class DraftHeadSizes:
    """Facts about a drafter that reads the other model's hidden states."""

    family: type[DraftHead]
    layers: tuple[int, ...]  # of the other model: the head reads the hidden states before each of them
    token_ids: IntArray | None = None  # [D]: the model's token of each that the head draws; None: the same
    mask_token_id: int | None = None  # stands for the tokens of a block, where the head drafts one at once
    draws_at_anchor: bool = False  # the block's first token, which is the request's last, draws the first draft


class ModelPart:
    """A model of a worker. Built empty, so that the memory plan can ask for sizes; read() then fills it."""

    def __init__(
        self,
        platform: Platform,
        hf_config: Any,
        build: BuildContext,
        sizes: ModelSizes,
        mixers: Sequence[LayerMixer],
        head: type[ModelBase] | None = None,
    ) -> None:
        """`mixers`: a list to which `build` appends those of the model's layers. `head`: the class, where the model's
        type does not say it: of a draft head, or of an encoder."""
        self.platform, self.mixers, self.build = platform, mixers, build
        self._cache = sizes.weights_cache
        self.rank = build.rank  # of its files; among the ranks of all stages, where there are several
        family: ModelFactory = head or model_class(hf_config, platform.models, sizes.transformers_backend)
        self.model: ModelBase = family(hf_config, build).eval()
        if not sizes.requested_outputs.logits:
            self.model.drop_lm_head()
        self.model.ignored_tensors = (*self.model.ignored_tensors, *sizes.ignored_tensors)
        checkpoint = sizes.quantization.checkpoint
        self.model.ignored_suffixes = checkpoint.ignored_suffixes if checkpoint else ()
        finalize(self.model)
        self.row_store = build.row_store
        if self.row_store is not None:
            self.row_store.attach(self.model, self.model.width)
        self._adaptable = {} if sizes.lora is None else adaptable_modules(self.model, sizes.lora)
        self._lora_sizes = sizes.lora
        self.lora: LoRAPools | None = None
        self._storing: StoreThread | None = None  # puts the weights into an automatic cache
        self._folder: Path | WeightFiles | None = None
        self._variants: Sequence[ShapeBucket] = ()
        self._dropped = self._is_read = False  # dropped by sleep(); and once read()
        self.has_files_weights = True  # False: others were written over them, which no file has
        self._whole: RunStep = no_step
        self.step: RunStep = no_step

    def settle(self, groups: Iterable[int], all_mixers: Sequence[LayerMixer]) -> None:
        """Called once, when this rank's layers and the groups of all parts are settled: makes the pools of adapters,
        and settles which mixer plans for each group: one of this model's, or of another part's where it has none."""
        if self._lora_sizes is not None:
            self.lora = LoRAPools(self.model, self.build, self._lora_sizes, self._adaptable)
        of_group = [[each for each in (*self.mixers, *all_mixers) if each.group == index] for index in groups]
        self._planners = [_planner(mixers) for mixers in of_group]
        self._plans = any(type(mixer).plan is not Mixer.plan for mixer in self._planners)
        crossing = any(each.is_cross for each in all_mixers)
        if {*self.mixers} != {*all_mixers} or crossing:
            writing = self.model.cross_mixers if isinstance(self.model, CrossEncoder) else self.mixers
            own = [each for each in writing if each.is_cross == isinstance(self.model, CrossEncoder)]
            self.model.state_groups = groups_by_tensor(own)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, and of the room for what requests bring, on this device."""
        return num_bytes(self.model, self.platform) + self._pool_bytes

    @property
    def _pool_bytes(self) -> int:
        """Bytes of what requests bring: adapters, and rows in the places of embeddings."""
        return sum(each.nbytes for each in (self.lora, self.row_store) if each is not None)

    def estimate(self, max_shape: MaxShape) -> Estimate:
        """Estimates the memory that the model takes on this device."""
        found = self.platform.estimate(self.model, distinct_parameters(self.model), max_shape)
        return found._replace(weights=found.weights + self._pool_bytes)

    def read(self, folder: Path | WeightFiles | None, progress: bool) -> None:
        """Reads the weights from the checkpoint as it is now; random ones without a folder."""
        self.finish_store()
        self._folder = folder
        self._storing = load(self.model, self.platform, folder, progress, self.rank, self._cache)
        if self.lora is not None:
            self.lora.place(self.platform)
        if self.row_store is not None:
            self.row_store.place(self.platform)
        self._dropped, self._is_read, self.has_files_weights = False, True, True

    def checkpoint_reader(self) -> Callable[[Weight], Tensor] | None:
        """Returns what reads weights as the checkpoint has them, in floats; None: none were read yet. ValueError if
        the model's are other ones by now."""
        if not self._is_read:
            return None
        if not self.has_files_weights:
            raise ValueError(
                "its factors (DoRA) depend on the model's weights, which were replaced while the engine ran, and no "
                "file has them; write the adapter into a model with `quintet merge-lora`, or load weights from files"
            )
        source = RandomWeights() if self._folder is None else Checkpoint(self._folder, self.model)

        def read(weight: Weight) -> Tensor:
            return weight.local({name: source.read(name, entry) for name, entry in weight.stored.items()})

        return read

    def finish_store(self) -> None:
        """Waits until the weights are in the cache: they are about to change, or to go."""
        if self._storing is not None:
            self._storing.close()
            self._storing = None

    def compile(self, variants: Iterable[ShapeBucket]) -> None:
        """Compiles the step for these sizes."""
        self.step = self._whole = self.platform.compile(self.model, variants)

    def allow_recorded(self, wanted: bool) -> None:
        """Sets whether recorded or captured steps may run. A replayed step skips Python code, such as looking at
        numbers, so code that needs it switches them off."""
        self.step = self._whole if wanted else torch.inference_mode()(self.model)

    def sleep(self) -> None:
        """Lets the compiled step go: a recorded one holds addresses."""
        self.step = self._whole = asleep_step

    def wake(self) -> None:
        """Reads dropped weights again."""
        if self._dropped:
            self.read(self._folder, progress=False)

    def drop_weights(self) -> int:
        """Drops the weights -> the bytes that they still took."""
        self._dropped = True
        return drop_tensors(self.model)

    def check_files(self, folder: Path | WeightFiles | None) -> None:
        """ValueError if the weights of a folder do not fit."""
        ParameterLoad(self.model, folder)

    def reload(self, folder: Path | WeightFiles | None) -> None:
        """Overwrites the weights with others of the same model: no step is compiled anew.

        ValueError if they do not fit, and then nothing has changed. After a later error it may be repeated.
        """
        reading, step = ParameterLoad(self.model, folder), self._whole
        self.step = failed_reload_step
        self.finish_store()
        reading.overwrite(self.platform)
        self.step, self._folder, self.has_files_weights = step, folder, True

    def with_plans(self, host: HostBatch) -> HostBatch:
        """Returns the batch with the plan of each group's mixer."""
        if not self._plans:
            return host
        planned = zip(self._planners, host.groups, strict=True)
        groups = tuple([group._replace(plan=mixer.plan(host, group)) for mixer, group in planned])
        return host._replace(groups=groups)


def _planner(mixers: Sequence[LayerMixer]) -> Mixer:
    """Returns the mixer that plans for a group: the first of those that plan, which are of one class."""
    planning = [each for each in mixers if type(each.mixer).plan is not Mixer.plan]
    kinds = {type(mixer.mixer) for mixer in planning}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"layers that keep alike are mixed by several classes here: {names}; one class plans for a group"
        )
    return (planning or mixers)[0].mixer


def groups_by_tensor(mixers: Iterable[LayerMixer]) -> dict[int, set[int]]:
    """Returns the groups of these mixers in each tensor of the state that they write."""
    found: dict[int, set[int]] = {}
    for mixer in mixers:
        if mixer.group is not None:
            for place in mixer.tensor_indices:
                found.setdefault(place, set()).add(mixer.group)
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each piece of memory, however many tensors lie on it."""
    return {memory.data_ptr(): memory.nbytes() for memory in (tensor.untyped_storage() for tensor in tensors)}


def drop_tensors(model: ModelBase) -> int:
    """Drops a model's parameters and buffers -> the bytes that they took."""
    tensors = [*model.parameters(), *model.buffers()]
    held = storage_bytes(tensors)
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)
    return sum(held.values())


def no_step(state: State, batch: Batch) -> tuple[Outputs, State]:
    """Step of a model that was not loaded."""
    raise RuntimeError("a step was asked of a worker before load()")


def failed_reload_step(state: State, batch: Batch) -> tuple[Outputs, State]:
    """Step of a model after reload() failed and left its weights partly replaced."""
    raise RuntimeError("the weights were replaced in part, and that failed; call reload_weights() again")


def asleep_step(state: State, batch: Batch) -> tuple[Outputs, State]:
    """The step of a worker that sleeps."""
    raise RuntimeError("a step was asked of a worker that is asleep")
