"""Base of the CUDA, ROCm and XPU platforms: one rank per device, graphs for steps of few tokens."""

import logging
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quintet.config import EngineConfig
from quintet.interface.platform import (
    Capabilities,
    Communicator,
    Device,
    Mixer,
    Platform,
    RecordEvent,
    Recording,
    SingleRank,
    Step,
    Unavailable,
)
from quintet.interface.types import AttentionSpec, Estimate, MaxShape, RankInfo, ShapeBucket, StateSpec
from quintet.interface.weights import Weight, WeightFormat, copied_into
from quintet.ops import attention
from quintet.ops.linear import KINDS
from quintet.ops.quantize import attributes, canonical, concat_outputs, quantize
from quintet.ops.states import mixer
from quintet.platforms.gpu import custom_all_reduce, invariant, processes, profiling, providers, weight_layout
from quintet.platforms.gpu.attention import GraphAttention, GraphStates, PlannerRegistry
from quintet.platforms.gpu.capture_sizes import (
    capture_size_warnings,
    capture_sizes,
    decode_buckets,
    mixed_buckets,
    mixed_capture_sizes,
    sizes_captured_late,
    sizes_with_planners,
    table_width,
)
from quintet.platforms.gpu.comm import GroupCommunicator, InProcessStores, SmallAllReduce, process_group
from quintet.platforms.gpu.device import GPUDevice, device_errors
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.graphs import MAX_GRAPHS, GraphedStep
from quintet.platforms.gpu.runtime import Runtime

logger = logging.getLogger(__name__)

GIB = 2**30
ALSO = (torch.float8_e4m3fnuz,)  # types of a cache: what some chips multiply in the place of e4m3fn
# Estimated bytes of a captured step, until a GPU has measured it: if too low, the last sizes to come run eagerly.
NODE = 16 * 2**10  # bytes of the device for one kernel
KERNELS = 1.5  # for each module that holds no other
UNVERIFIED = "unverified: no step of this platform has run on a GPU yet; please report what you see"


class GPU(Platform):
    """Base of GPU platforms: a subclass lists the devices and names the torch module that drives them."""

    op_priority = providers.PRIORITY
    _mp, _unverified = False, UNVERIFIED  # whether ranks may be processes; what no device has shown
    _collectives = "NCCL"  # torch's name for the library of them
    supports_states = True
    _asks: Mapping[tuple[str, str], str] = providers.HOST_SYNCS
    optional_spec_fields = frozenset({"chunk"})

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        if self._config.batch_invariant:
            self.op_priority = {**self.op_priority, **providers.INVARIANT}  # type: ignore[misc]  # of this engine alone
        self._runtime = self._make_runtime()
        self._devices: dict[int, GPUDevice] = {}
        self._meeting, self._lock = InProcessStores(), threading.Lock()
        self._sizes, self._mixed_sizes = capture_sizes(self._config), mixed_capture_sizes(self._config)
        self._planning: dict[int, PlannerRegistry] = {}  # by rank
        # (rank, its slice) of checkpoint tensors that two layers want -> where it was put
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._packs: dict[str, bool] = {}  # by the kind of a format
        self._refused: set[str] = set()
        self._ops: dict[int, Any] = {}  # by rank, as layers bind them
        self._specs: dict[AttentionSpec, str | None] = {}  # what our kernels serve, or why they do not
        self._fallen: set[AttentionSpec] = set()  # to torch's attention, because ours does not
        self._trying = threading.Lock()
        self._pool_bytes = 0  # that the largest captured step takes

    @classmethod
    @abstractmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        """Returns the devices, or why there are none."""

    @classmethod
    @abstractmethod
    def _make_runtime(cls) -> Runtime:
        """Returns the runtime that drives the devices."""

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        if isinstance(found := cls._facts(), Unavailable):
            return found
        return Capabilities(
            devices=len(found.names),
            dtypes=found.dtypes,
            fp8=found.fp8,
            weight_formats=frozenset({*KINDS, "mins", "order", "grouped"}),
            overlap=True,
            lora=True,
            sleep=True,
            batch_invariant_mode=True,
            compiles_late=True,
            mp=cls._mp,
            detail="; ".join(filter(None, (found.warning, found.detail, cls._unverified.partition(";")[0]))),
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        found = cls._facts()
        assert isinstance(found, GPUFacts), "configured, though it is not available"
        if config.tensor_parallel_size > len(found.names):
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs as many devices, {len(found.names)} here; "
                "lower it"
            )
        warnings = filter(None, (cls._unverified, found.warning))
        return config, [*warnings, *capture_size_warnings(config), *invariant.describe(config)]

    def open(self, rank: int) -> Device:
        device = GPUDevice(self._runtime, rank)
        if rank == 0 and isinstance(found := self._facts(), GPUFacts) and found.warning:
            logger.warning("%s", found.warning)
        with self._lock:
            providers.register()
            self._devices[rank] = device
        return device

    def connect(self, rank_info: RankInfo) -> Communicator:
        if rank_info.size == 1:
            return SingleRank()
        if not rank_info.endpoint:  # one of several processes: its model is looked at and not run
            return GroupCommunicator(None, rank_info.rank, rank_info.size)
        self._runtime.use(rank_info.rank)
        across = self._mp and rank_info.endpoint.startswith(processes.TCP)
        met = processes.rendezvous(rank_info, self._config) if across else None
        rank_info = rank_info if met is None else met.rank_info
        store = self._meeting.store(rank_info.rank, rank_info.size, rank_info.endpoint)
        group = self._group(store, rank_info.rank, rank_info.size)
        small = None if self._config.batch_invariant else self._small_all_reduce(store, rank_info)
        made = GroupCommunicator(group, rank_info.rank, rank_info.size, small, met)
        return made.in_rank_order() if self._config.batch_invariant else made

    def _group(self, store: Any, rank: int, size: int) -> Any:
        """The process group of the collectives."""
        return process_group(self._collectives, store, rank, size)

    def _small_all_reduce(self, store: Any, rank_info: RankInfo) -> SmallAllReduce | None:
        """The sum of small messages, where it serves; the reason why not is logged once."""
        made: Any
        if rank_info.endpoint.startswith("inproc://"):
            made = custom_all_reduce.load()
            if not isinstance(made, str):
                made = custom_all_reduce.join(made, store, rank_info.rank, rank_info.size, self._queue)
        else:
            made = self._process_all_reduce(store, rank_info)
        if not isinstance(made, str):
            found: SmallAllReduce = made
            return found
        if rank_info.rank == 0:
            logger.info("small sums are left to %s: %s", self._collectives, made)
        return None

    def _process_all_reduce(self, store: Any, rank_info: RankInfo) -> SmallAllReduce | str:
        """The same where ranks are processes, or why there is none."""
        return f"ranks of several processes meet at {rank_info.endpoint!r}"

    def _queue(self) -> int:
        """The thread's current stream, as libraries know it."""
        return int(self._runtime.current().cuda_stream)

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        with self._lock:
            planning = self._planning.setdefault(rank, PlannerRegistry())
            self._ops[rank] = ops
        if isinstance(spec, StateSpec):
            return GraphStates(spec, ops, planning)
        if spec.source == "none":
            return mixer(spec, ops)
        asked = self._config.attention_backend != "auto" or self._config.batch_invariant
        made = "" if asked else self._library_mixer(spec, ops, rank, planning)
        if isinstance(made, str):
            if made and made not in self._refused:
                self._refused.add(made)
                logger.info("attention by %s: %s", ops.choice("paged_attention").provider, made)
            own = self._own_mixer(spec, ops, rank)
            prompts = None if asked else self._prompt_mixer(spec, ops, rank)
            return GraphAttention(own, spec, planning, whole_prompt=prompts)
        # what plans on the host serves no captured step with prompts; ours does, unless it asks the host, too
        beside = self._serving(spec, ops, rank)
        planning.planners_optional = planning.planners_optional and beside is not None
        return GraphAttention(made, spec, planning, beside)

    def _serving(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer | None:
        """_own_mixer() where it serves in captured steps."""
        provider = ops.choice("paged_attention").provider
        if provider == "gathered" or (provider in providers.PACKED_PROVIDERS and self._why_not(spec, rank) is not None):
            return None
        return attention.mixer(spec, ops, ALSO)

    def _own_mixer(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer:
        """Made of the bound ops. A layer that our kernels do not serve gets torch's attention, which is never captured;
        ValueError if these kernels were asked for by name."""
        if ops.choice("paged_attention").provider not in providers.PACKED_PROVIDERS:
            return attention.mixer(spec, ops, ALSO)
        why = self._why_not(spec, rank)
        if why is None:
            return attention.mixer(spec, ops, ALSO)
        if self._config.attention_backend == "triton" or self._config.batch_invariant or spec.source == "cross":
            raise ValueError(f"attention by Triton kernels: {why}")
        if why not in self._refused:
            self._refused.add(why)
            logger.warning("attention by torch, slow and not captured, for %s: Triton kernels: %s", spec, why)
        self._fallen.add(spec)
        return attention.PagedAttention(spec, cast(Any, providers.TorchAttentionOps()), ALSO)

    def _why_not(self, spec: AttentionSpec, rank: int) -> str | None:
        """Tries each kind of layer once, whichever rank builds it first."""
        from quintet.platforms.gpu.ops import attention as triton_attention

        with self._trying:
            if spec not in self._specs:
                self._runtime.use(rank)
                device = self._runtime.empty((0,), torch.uint8, rank).device
                found = "; ".join(triton_attention.reasons(spec)) or triton_attention.trial(spec, device)
                self._specs[spec] = found or None
            return self._specs[spec]

    def _uncaptured(self, model: nn.Module) -> list[str]:
        """Why no step is captured: before one is tried. torch's own functions may look at what a device holds."""
        if not getattr(model, "recordable", True):
            return ["the model computes with more than ops"]
        bound = {choice: None for ops in self._ops.values() for choice in ops.bound}
        fallen = [f"attention for {spec} by torch asks the host" for spec in self._fallen]
        return [*providers.host_syncing_ops(bound, self._asks), *fallen]

    def _library_mixer(self, spec: AttentionSpec, ops: Any, rank: int, planning: PlannerRegistry) -> Mixer | str:
        """One that is made of more than ops, or why there is none; "" if none was looked for."""
        return ""

    def _prompt_mixer(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer | None:
        """A faster one for steps that are planned as WHOLE, if there is one."""
        return None

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        device = self._devices[weight.rank]
        if not weight.format.plain:
            placed = self._quantized(device, weight, parts)
        elif weight.shared and len(weight.slices) == 1:
            placed = {weight.name: self._once(device, weight, parts)}
        else:
            placed = {weight.name: device.upload(weight.local(parts), weight.dtype)}
        if into is not None:
            return copied_into(placed, into, weight.rows)
        device.tagged_memory.track("weights", placed.values())
        return placed

    def _once(self, device: GPUDevice, weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tied head and its embedding live on the same memory."""
        part = weight.slices[0]
        key = weight.rank, weight.dtype, weight.axis, part.offset, part.ranges[weight.rank], part.transposed
        source = tensors[next(iter(weight.stored))]
        with self._lock:
            put = self._shared.setdefault(source, {})
        if key not in put:
            put[key] = device.upload(weight.local(tensors), weight.dtype)
        return cast(Tensor, put[key])

    def _quantized(self, device: GPUDevice, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """For the provider, or for the specification."""
        packed = self._is_packed(weight.format)
        if self._config.batch_invariant and weight_layout.fits_tiles(weight.shape[-1], weight.format):
            raise ValueError(
                f"batch_invariant=True: {weight.slices[0].source} is in {weight.format.kind} with groups of "
                f"{weight.format.group}, which our kernels do not cut; torch multiplies it, and its bits depend on the "
                "batch: leave batch_invariant out, or use a checkpoint with groups of a multiple of 16"
            )
        if weight.reader is not None:
            matrix = canonical(weight, parts)
            there = {name: device.upload(each, each.dtype) for name, each in attributes(matrix).items()}
            return weight_layout.pack_matrix(there, matrix.format) if packed else there
        try:
            if weight.format.dtype is not None or weight.format.codebook:  # their scales may be of each part as a whole
                pieces = [
                    quantize(device.upload(each, each.dtype), weight.format) for each in weight.local_slices(parts)
                ]
                placed = attributes(concat_outputs(pieces))
                return weight_layout.pack_matrix(placed, weight.format) if packed else placed
            local = weight.local(parts)
            up = device.upload(local, local.dtype)
            return weight_layout.pack(up, weight.format) if packed else attributes(quantize(up, weight.format))
        except ValueError as error:
            raise ValueError(f"{weight.slices[0].source} cannot be quantized: {error}") from None

    def _is_packed(self, fmt: WeightFormat) -> bool:
        with self._lock:
            if fmt.kind not in self._packs:
                self._packs[fmt.kind] = providers.can_pack(fmt.kind, self.op_priority)
            return self._packs[fmt.kind]

    def estimate(self, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        buckets = self._captured_buckets(model, max_shape.largest)
        placed, attending = sum(map(self._placed_bytes, weights)), self._attending(max_shape.largest.requests)
        captured = self._captured_bytes(model, buckets, max_shape) + self._library_bytes(buckets, max_shape)
        attending += self._ordered_sum_bytes(weights, max_shape.largest.tokens, max_shape.hidden)
        if buckets:  # their pool is their own
            captured += self._attending(max(each.requests for each in buckets))
            captured += self._ordered_sum_bytes(weights, max(each.tokens for each in buckets), max_shape.hidden)
        late = sizes_captured_late(self._config, buckets)
        return Estimate(placed, max_shape.workspace + attending, captured, buckets, late)

    def _ordered_sum_bytes(self, weights: Sequence[Weight], tokens: int, hidden: int) -> int:
        """Bytes of a sum in rank order, for which every rank has all that is added, and two rows of float32."""
        ranks = self._config.tensor_parallel_size
        if not self._config.batch_invariant or ranks == 1:
            return 0
        return tokens * hidden * (ranks * max((each.dtype.itemsize for each in weights), default=4) + 2 * 4)

    def _library_bytes(self, buckets: Sequence[ShapeBucket], extent: MaxShape) -> int:
        """Returns the bytes of mixers that are made of more than ops, beside their results."""
        return 0

    def _attending(self, requests: int) -> int:
        """Bytes that attention takes beside its results: of the layer that takes most, as they run one by one."""
        served = [spec for spec, why in self._specs.items() if why is None]
        if not served:
            return 0
        from quintet.platforms.gpu.ops import attention as triton_attention

        device = self._runtime.empty((0,), torch.uint8, min(self._ops)).device
        return max(triton_attention.workspace(spec, requests, device) for spec in served)

    def _captured_buckets(self, model: nn.Module, most: ShapeBucket) -> tuple[ShapeBucket, ...]:
        """The largest first; none where something asks the host in the midst of a step."""
        uncaptured = self._uncaptured(model) if self._sizes or self._mixed_sizes else []
        for why in [each for each in uncaptured if each not in self._refused]:
            self._refused.add(why)
            logger.warning("no step is captured, so decoding is slower than it could be: %s", why)
        if uncaptured:
            return ()
        sizes = self._mixed_sizes if all(planning.planners_optional for planning in self._planning.values()) else ()
        if any(planning.has_planners for planning in self._planning.values()):
            sizes = sizes_with_planners(self._config, sizes)
        mixed = mixed_buckets(most, sizes, drafts=self._config.speculative_config is not None)
        return *mixed, *decode_buckets(most, self._sizes)

    def _placed_bytes(self, weight: Weight) -> int:
        fmt = weight.format
        if fmt.plain or not self._is_packed(fmt):
            return weight.nbytes
        as_matrix = fmt.dtype is not None or fmt.codebook or weight.reader is not None
        return (weight_layout.matrix_packed_bytes if as_matrix else weight_layout.packed_bytes)(weight.shape, fmt)

    def _captured_bytes(self, model: nn.Module, buckets: Sequence[ShapeBucket], extent: MaxShape) -> int:
        if not buckets:
            return 0
        late = sizes_captured_late(self._config, buckets)
        ahead = sum(each.tokens not in late for each in buckets) if self._config.capture_ahead else 0  # none is dropped
        times = 1 + self._config.enable_lora  # with adapters and without
        count = times * ahead + min(times * (len(buckets) - ahead), MAX_GRAPHS)
        kernels = KERNELS * sum(not any(True for _ in module.children()) for module in model.modules())
        tokens, requests, rows, *_ = (max(each) for each in zip(*buckets, strict=True))
        outputs = 4 * rows * (extent.vocab + extent.hidden)  # that all graphs write to
        tables = sum(4 * requests * sum(map(table_width, pages)) for pages in {each.pages for each in buckets})
        self._pool_bytes = extent._replace(largest=ShapeBucket(tokens, requests, rows, ())).workspace
        return int(count * kernels * NODE) + outputs + tables + self._pool_bytes

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        bound = {choice: None for ops in self._ops.values() for choice in ops.bound}
        invariant.check(self._config, getattr(model, "recordable", True), bound)
        index = next(model.parameters()).device.index
        device = self._devices[min(self._devices) if index is None else index]  # None: the host stands for a device
        captured = list(buckets)
        if (planning := self._planning.get(device.index)) is not None:
            planning.captured_sizes = frozenset((each.tokens, each.requests) for each in captured if not each.decode)
        how = self._config.capture_ahead, self._pool_bytes, sizes_captured_late(self._config, captured)
        run: Step = GraphedStep(model, device, captured, *how) if captured else model

        @torch.inference_mode()
        def step(state: Any, batch: Any) -> Any:
            self._runtime.use(device.index)
            with device_errors():
                return run(state, batch)

        return step

    def profile(self, record: RecordEvent) -> Recording:
        return profiling.record(self._config.profiler_config, record)
