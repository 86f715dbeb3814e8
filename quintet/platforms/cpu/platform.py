"""The CPU as a platform: eager torch on host memory."""

import functools
import math
import os
import platform as host
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quintet.common.file_digests import sources_digest
from quintet.config import SCHEMES, EngineConfig, read_environment
from quintet.interface.platform import (
    Capabilities,
    Communicator,
    Device,
    Mixer,
    Platform,
    RecordEvent,
    Recording,
    SingleRank,
    State,
    Step,
    Unavailable,
)
from quintet.interface.types import (
    INT4,
    AttentionSpec,
    Batch,
    Estimate,
    Layout,
    MaxShape,
    Memory,
    Outputs,
    RankInfo,
    ShapeBucket,
    StateSpec,
)
from quintet.interface.weights import Weight, copied_into
from quintet.ops.quantize import attributes
from quintet.ops.states import mixer
from quintet.platforms.cpu import gguf_weights as blocks
from quintet.platforms.cpu import numa_binding as seats
from quintet.platforms.cpu import providers
from quintet.platforms.cpu.arena import use_small_pages
from quintet.platforms.cpu.configure import (
    MAX_RANKS,
    NO_RANKS,
    default_activation_bits,
    describe_ranks,
    granted_threads,
    load_extension,
    threads_per_rank,
)
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.cpu.graph import MAX_TOKENS, Replay
from quintet.platforms.cpu.numa_binding import num_ranks
from quintet.platforms.cpu.ops import heads as native_heads
from quintet.platforms.cpu.ops import linear as native_linear
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops import quantized, quantized_moe
from quintet.platforms.cpu.ops import quantized_embedding as quantized_rows
from quintet.platforms.cpu.ops.quantized_moe import packer_of
from quintet.platforms.cpu.ops.torch_attention import SPLIT
from quintet.platforms.cpu.profiling import DESCRIPTION, TorchCalls
from quintet.platforms.cpu.shared_memory import INPROC, SharedFiles, SharedMemory, connect_ranks
from quintet.platforms.cpu.stage_buffers import rank_lost_as_device_lost
from quintet.platforms.cpu.tcp_comm import TCP, RendezvousTerms, connect_over_network
from quintet.platforms.host import host_memory, threads
from quintet.platforms.numa import bind_to_node

GIB = 2**30
KV_SHARE = 0.5  # of the memory that may be used, at most: host memory is everybody's
MAX_KV_BYTES = 4 * GIB  # what an unasked-for cache may take; a laptop has other things to do
BESIDE = ("table4", "table8", "fp8", "mins", "order", "grouped", "experts")  # SCHEMES: what our products take
PACKAGE = Path(__file__).parents[2]
PACKING = ("platforms/cpu", "layers/quantization", "model_loader", "gguf", "ops/quantize.py")  # code that packs weights
Packing = Callable[[], Mapping[str, Tensor]]
# multiply-adds of a step; in a smaller one threads wait for each other longer than they work
WORTH_THREADS = 30_000_000


class CPUDevice(Device):
    """Host memory: nothing is copied that need not be."""

    def __init__(self, ranks: int = 1) -> None:
        """`ranks`: that share it, each with a process of its own; of all engines."""
        self._ranks = ranks

    def memory(self) -> Memory:
        free, total, peak = host_memory()
        return Memory(free // self._ranks, total // self._ranks, peak)

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        need, free = sum(layout.nbytes for layout in layouts) * units, self.memory().free
        if need > free:
            raise MemoryError(
                f"KV cache of {units} pages needs {need / GIB:.2f} GiB, {free / GIB:.2f} GiB of host memory are free; "
                "lower kv_cache_memory_bytes or max_model_len"
            )
        return tuple(_zeros((units, *layout.shape), layout.dtype) for layout in layouts)

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return tuple([torch.from_numpy(array) for array in arrays])

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        copy = x.clone()  # the next step writes where this one's results are
        return lambda: copy

    def sleep(self, level: int) -> int:
        """Frees nothing: weights are on the host as they are, and what callers release is free at once."""
        return 0

    def wake(self) -> None:
        """Does nothing: the caller makes again what it released."""


class CPU(Platform):
    """Our own kernels where they are compiled, torch for the rest; eager. Batch invariant: each says how."""

    name = "cpu"
    op_priority = providers.PRIORITY
    supports_states = True
    optional_spec_fields = frozenset(
        {"chosen", "chosen_blocks", "chunk", "compressed", "cross", "distances", "max_drafts", "until"}
    )

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        # checkpoint tensors that two layers want -> what was packed of them, by the format and the share
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tell: RecordEvent | None = None  # of calls, while a trace runs
        self._rooms = SharedFiles()
        self._comm: SharedMemory | None = None  # of the rank that this process is, if it is one of several
        self._threads = 0  # of this rank, once it is open
        self._threaded = False  # whether the ranks are threads: the conformance kit's are

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        return Capabilities(
            devices=1 if load_extension() is None else MAX_RANKS,
            dtypes=(torch.bfloat16, torch.float32, torch.float16),
            weight_formats=frozenset(
                [*SCHEMES, *(BESIDE if _can_pack() else ("grouped",)), *["embedding"] * _can_look_up_packed()]
            ),
            lora=load_extension() is None or hasattr(load_extension(), "add_lora"),  # an older one lacks it
            lora_experts=load_extension() is None or hasattr(load_extension(), "EXPERT_LORA"),
            sleep=True,
            batch_invariant=True,
            processes=True,
            ray_resources={"CPU": float(threads())},
            layout_key=_layout_key(),
            detail=f"{describe()}; {threads()} threads, {host.machine()}",
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        if SPLIT % config.page_size:
            raise ValueError(f"page_size {config.page_size} must divide {SPLIT} on this platform; use 16, 32 or 64")
        config, reasons = default_activation_bits(config)
        config, chosen = seats.resolve_tensor_parallel_size(config, 1 if load_extension() is None else MAX_RANKS)
        reasons += [*chosen, *describe_ranks(config)]
        if config.kv_cache_memory_bytes is not None or config.num_pages is not None:
            return config, reasons
        ranks = num_ranks(config)
        share = min(MAX_KV_BYTES, int(host_memory().free * config.gpu_memory_utilization * KV_SHARE)) // ranks
        reason = (
            f"kv_cache_memory_bytes={share} ({share / GIB:.1f} GiB): nothing was asked for, so at most {KV_SHARE:.0%} "
            f"of the host memory that may be used, and {MAX_KV_BYTES // GIB} GiB{' for all ranks' if ranks > 1 else ''}"
        )
        return config.replace(kv_cache_memory_bytes=share), [*reasons, reason]

    def open(self, rank: int) -> Device:
        granted_threads()  # before any step changes it
        ranks = num_ranks(self._config)
        first = ranks // self._config.num_local_engines * seats.engine_index(self._config)
        if load_extension() is not None:
            load_extension().choose_isa(read_environment().cpu_isa or load_extension().isa())
            bind, where = read_environment().cpu_bind, seats.numa_share_of(self._config, (first + rank) % ranks)
            self._threads, place = threads_per_rank(ranks), ((first + rank) % ranks, ranks)
            if where is not None:
                bind_to_node(where)  # before the workers are there, whom it takes along
                self._threads, place = seats.threads_at(where, self._config, granted_threads()), where[1:]
            load_extension().set_threads(self._threads, bind, *place)  # weights are packed by all
        return CPUDevice(ranks)

    def connect(self, rank_info: RankInfo) -> Communicator:
        if rank_info.size == 1:
            return SingleRank()
        if load_extension() is None:
            raise ValueError(f"{rank_info.size} ranks asked for, and {NO_RANKS}")
        seconds = self._config.distributed_timeout_seconds
        over_network = rank_info.endpoint.startswith(TCP)
        terms = RendezvousTerms(seconds, self._config.join_timeout_seconds, self._config.nnodes)
        made = (
            connect_over_network(rank_info, terms) if over_network else connect_ranks(rank_info, self._rooms, seconds)
        )
        if isinstance(made, SharedMemory):
            self._comm, self._threaded = made, rank_info.endpoint.startswith(INPROC)
        return made

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        return mixer(spec, ops, (INT4,))

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = self._plain(weight, parts) if weight.format.plain else self._quantized(weight, parts)
        return placed if into is None else copied_into(placed, into, weight.rows)

    def _plain(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if weight.use.endswith("experts") and native_moe.can_pack(weight):
            return {weight.name: native_moe.pack(weight, parts)}
        if native_heads.can_pack(weight):
            return {weight.name: native_heads.pack(weight, parts)}
        if not _can_pack() or (weight.use != "linear" and not _is_packed_table(weight)):
            # an embedding stays a view of the checkpoint's memory map where types agree
            return {weight.name: weight.local(parts).to(weight.dtype)}
        pieces = [weight.local(parts)] if weight.axis else weight.local_slices(parts)
        if not _is_packed_table(weight):
            return {weight.name: native_linear.pack(*(piece.to(weight.dtype) for piece in pieces))}
        return self._once(weight, parts, lambda: {weight.name: native_linear.pack(pieces[0].to(weight.dtype))})

    def _quantized(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if weight.stack:
            return quantized_moe.pack(weight, parts)
        if weight.shared and len(weight.slices) == 1:
            return self._once(weight, parts, lambda: self._pack_quantized(weight, parts))
        return self._pack_quantized(weight, parts)

    def _once(self, weight: Weight, parts: Mapping[str, Tensor], make: Packing) -> Mapping[str, Tensor]:
        """A tied head and its table live on the same memory."""
        part = weight.slices[0]
        key = weight.format, weight.dtype, weight.axis, part.offset, part.ranges[weight.rank]
        found: dict[Any, Mapping[str, Tensor]] = self._shared.setdefault(parts[next(iter(weight.stored))], {})
        if key not in found:
            found[key] = make()
        return found[key]

    def _pack_quantized(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not _can_pack_quantized(weight):
            return attributes(blocks.canonical(weight, parts))
        try:
            if quantized_moe.quantizes_floats(weight):
                return quantized.pack(weight.local(parts), weight.format)
            with use_small_pages(self._config.weights_cache == "auto"):  # of GGUF files, which it keeps
                packed = blocks.pack(weight, parts) if blocks.can_pack(weight) else None
                packed = blocks.pack_by_stretches(weight, parts) if packed is None else packed
            return packer_of(weight.format).pack(blocks.canonical(weight, parts)) if packed is None else packed
        except ValueError as error:
            done = "quantized" if weight.reader is None else "packed"
            raise ValueError(f"{weight.slices[0].source} cannot be {done}: {error}") from None

    def estimate(self, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        rows = 0 if self._config.enforce_eager else min(max_shape.largest.rows, MAX_TOKENS)
        captured = rows * max_shape.vocab * 4  # recorded steps of all sizes give their logits in the same place
        products = {(each.shape, each.dtype) for each in weights if each.use == "linear" and each.format.plain}
        tokens = max_shape.largest.tokens
        scratch = [native_linear.scratch_bytes(tokens, *each) for each in products] if _can_pack() else []
        return Estimate(sum(map(self._placed_bytes, weights)), max_shape.workspace + max(scratch, default=0), captured)

    def _placed_bytes(self, weight: Weight) -> int:
        if not weight.format.plain:
            if weight.stack:
                return quantized_moe.stack_packed_bytes(weight)
            return quantized_moe.matrix_packed_bytes(weight) if _can_pack_quantized(weight) else weight.nbytes
        if weight.use.endswith("experts") and native_moe.can_pack(weight):
            return native_moe.packed_bytes(weight)
        if native_heads.can_pack(weight):
            return native_heads.packed_bytes(weight)
        if _can_pack() and (weight.use == "linear" or _is_packed_table(weight)):
            return native_linear.packed_bytes(weight.shape, weight.dtype)
        return weight.nbytes

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        size = sum(weight.numel() for weight in model.parameters())
        extension = load_extension()
        most = self._threads or threads_per_rank(num_ranks(self._config))
        # torch's threads spin on our cores after each of its ops: where the products are ours, it gets one
        torchs = 1 if _can_pack() or size < WORTH_THREADS else most

        eager = extension is None or self._config.enforce_eager or not getattr(model, "recordable", True)
        writers = getattr(model, "state_groups", None)
        comm = self._comm
        if comm is None:
            run = model if eager else Replay(model, extension, writers=writers)
        else:  # if ranks are threads, the platform does not know which rank has the model: they record nothing
            run = model if eager or self._threaded else Replay(model, extension, comm.all_agree, writers)

        @torch.inference_mode()
        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            if torch.get_num_threads() != torchs:  # another engine of this process runs with another number
                torch.set_num_threads(torchs)
            if extension is not None:
                small = size * batch.token_ids.shape[0] < WORTH_THREADS
                extension.limit_threads(1 if small else most)  # of this thread's calls: the process's threads stay
            if self._tell is not None:
                with TorchCalls(self._tell):
                    return _eager(model, state, batch)
            result: tuple[Outputs, State] = run(state, batch)
            return result

        return step if comm is None else rank_lost_as_device_lost()(step)

    def profile(self, record: RecordEvent) -> Recording:
        self._tell = record

        def stop() -> None:
            self._tell = None

        return Recording(DESCRIPTION, stop)


@functools.cache
def _layout_key() -> str:
    """Tiles are the compiled extension's, and so is the choice of scales, which may differ by instruction set."""
    extension, sources = load_extension(), sources_digest(PACKAGE / each for each in PACKING)
    if extension is None:
        return f"torch {sources}"
    state, isa = os.stat(extension.__file__), read_environment().cpu_isa or extension.isa()
    return f"{extension.__file__} {state.st_size} {state.st_mtime_ns} {isa} {sources}"


def _eager(model: nn.Module, state: State, batch: Batch) -> tuple[Outputs, State]:
    result: tuple[Outputs, State] = model(state, batch)
    return result


def _is_packed_table(weight: Weight) -> bool:
    """True if rows of a table can be looked up in the layout that products want: a tied head is then held once.

    Not where ranks share the table out: each looks up its own rows, and knows them by their first.
    """
    alone = len(weight.slices) == 1 and len(weight.slices[0].ranges) == 1 and len(weight.shape) == 2
    return (
        weight.use != "vector"
        and weight.shared
        and alone
        and weight.shape[1] % native_linear.PAIRS.get(weight.dtype, 1) == 0
    )


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when they are first written to; torch's own would take all of it at once."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)


@functools.cache
def _can_pack() -> bool:
    """True if products run on our kernels, so that weights should be packed."""
    return native_linear.probe() is None


def _can_look_up_packed() -> bool:
    """True if rows can be looked up in the packed weights of our products."""
    return _can_pack() and quantized_rows.probe() is None


def _can_pack_quantized(weight: Weight) -> bool:
    return quantized_moe.can_pack_format(weight.format, weight.shape[1])
