"""The CPU as a platform: eager torch on host memory."""

import functools
import math
import os
import platform as host
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quintet.config import SCHEMES, EngineConfig, read_environment
from quintet.ops.mixers import mixer
from quintet.ops.quantize import attributes
from quintet.platforms.cpu import (
    blocks,
    native_heads,
    native_moe,
    providers,
    quantized,
    quantized_moe,
    quantized_rows,
    seats,
)
from quintet.platforms.cpu import linear as native_linear
from quintet.platforms.cpu.attention import SPLIT
from quintet.platforms.cpu.comm import INPROC, Rooms, SharedMemory, joined
from quintet.platforms.cpu.features import describe
from quintet.platforms.cpu.networked import TCP, Terms, networked
from quintet.platforms.cpu.pipe import naming_the_lost
from quintet.platforms.cpu.quantized_moe import packer_of
from quintet.platforms.cpu.replay import MOST_TOKENS, Replay
from quintet.platforms.cpu.seats import num_ranks
from quintet.platforms.cpu.traced import HOW, TorchCalls
from quintet.platforms.host import host_memory, threads
from quintet.platforms.interface import (
    Alone,
    Capabilities,
    Communicator,
    Device,
    Mixer,
    Platform,
    Recording,
    State,
    Step,
    Tell,
    Unavailable,
    written,
)
from quintet.platforms.numa import sit
from quintet.types import AttentionSpec, Batch, Estimate, Extent, Layout, Memory, Outputs, Place, StateSpec, Variant
from quintet.weights import Weight

GIB = 2**30
KV_SHARE = 0.5  # of the memory that may be used, at most: host memory is everybody's
KV_MOST = 4 * GIB  # what an unasked-for cache may take; a laptop has other things to do
BESIDE = ("table4", "table8", "fp8", "mins", "order", "grouped", "experts")  # SCHEMES: what our products take
Packing = Callable[[], Mapping[str, Tensor]]
NO_RANKS = "ranks share memory by the compiled extension, which is not there; install a C++ compiler, and quintet anew"
MOST_RANKS = 16  # that share a model; where there are fewer cores, ranks wait for one
STARTED = {"ray": ", Ray's actors", "external_launcher": ", the launcher's"}  # ranks that are not started by us
WORTH_THREADS = (
    30_000_000  # multiply-adds of a step; in a smaller one threads wait for each other longer than they work
)


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
        """Nothing is its own: weights are on the host as they are, and what callers let go of is free at once."""
        return 0

    def wake(self) -> None:
        """What was let go of is the caller's to make again."""


class CPU(Platform):
    """Our own kernels where they are compiled, torch for the rest; eager. Batch invariant: each says how."""

    name = "cpu"
    op_priority = providers.PRIORITY
    states = True
    heeds = frozenset({"chunk"})

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        # checkpoint tensors that two layers want -> what was packed of them, by the form and the share
        self._shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._tell: Tell | None = None  # of calls, while a trace runs
        self._rooms = Rooms()
        self._comm: SharedMemory | None = None  # of the rank that this process is, if it is one of several
        self._threads = 0  # of this rank, once it is open
        self._threaded = False  # whether the ranks are threads: the conformance kit's are

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        return Capabilities(
            devices=1 if _extension() is None else MOST_RANKS,
            dtypes=(torch.bfloat16, torch.float32, torch.float16),
            quant=frozenset([*SCHEMES, *(BESIDE if _packs() else ("grouped",)), *["rows"] * _looks_up()]),
            sleep=True,
            batch_invariant=True,
            processes=True,
            bundle={"CPU": float(threads())},
            placing=_placing(),
            detail=f"{describe()}; {threads()} threads, {host.machine()}",
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        if SPLIT % config.page_size:
            raise ValueError(f"page_size {config.page_size} must divide {SPLIT} on this platform; use 16, 32 or 64")
        config, reasons = _rounding(config)
        config, chosen = seats.settled(config, 1 if _extension() is None else MOST_RANKS)
        reasons += [*chosen, *_sharing(config)]
        if config.kv_cache_memory_bytes is not None or config.num_pages is not None:
            return config, reasons
        ranks = num_ranks(config)
        share = min(KV_MOST, int(host_memory().free * config.gpu_memory_utilization * KV_SHARE)) // ranks
        reason = (
            f"kv_cache_memory_bytes={share} ({share / GIB:.1f} GiB): nothing was asked for, so at most {KV_SHARE:.0%} "
            f"of the host memory that may be used, and {KV_MOST // GIB} GiB{' for all ranks' if ranks > 1 else ''}"
        )
        return config.replace(kv_cache_memory_bytes=share), [*reasons, reason]

    def open(self, rank: int) -> Device:
        _granted()  # before any step changes it
        ranks = num_ranks(self._config)
        first = ranks // self._config.engines_of_machine * seats.number_of(self._config)
        if _extension() is not None:
            _extension().choose_isa(read_environment().cpu_isa or _extension().isa())
            bind, where = read_environment().cpu_bind, seats.seat_of(self._config, (first + rank) % ranks)
            self._threads, place = _shared_out(ranks), ((first + rank) % ranks, ranks)
            if where is not None:
                sit(where)  # before the workers are there, whom it takes along
                self._threads, place = seats.threads_at(where, self._config, _granted()), where[1:]
            _extension().set_threads(self._threads, bind, *place)  # weights are packed by all
        return CPUDevice(ranks)

    def connect(self, place: Place) -> Communicator:
        if place.size == 1:
            return Alone()
        if _extension() is None:
            raise ValueError(f"{place.size} ranks asked for, and {NO_RANKS}")
        seconds = self._config.distributed_timeout_seconds
        over_network = place.endpoint.startswith(TCP)
        terms = Terms(seconds, self._config.join_timeout_seconds, self._config.nnodes)
        made = networked(place, terms) if over_network else joined(place, self._rooms, seconds)
        if isinstance(made, SharedMemory):
            self._comm, self._threaded = made, place.endpoint.startswith(INPROC)
        return made

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        return mixer(spec, ops)

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = self._plain(weight, parts) if weight.form.plain else self._quantized(weight, parts)
        return placed if into is None else written(placed, into)

    def _plain(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if weight.use.endswith("experts") and native_moe.packs(weight):
            return {weight.name: native_moe.pack(weight, parts)}
        if native_heads.packs(weight):
            return {weight.name: native_heads.pack(weight, parts)}
        if not _packs() or (weight.use != "linear" and not _looks_up_packed(weight)):
            # an embedding stays a view of the checkpoint's memory map where types agree
            return {weight.name: weight.local(parts).to(weight.dtype)}
        pieces = [weight.local(parts)] if weight.axis else weight.pieces(parts)
        if not _looks_up_packed(weight):
            return {weight.name: native_linear.pack(*(piece.to(weight.dtype) for piece in pieces))}
        return self._once(weight, parts, lambda: {weight.name: native_linear.pack(pieces[0].to(weight.dtype))})

    def _quantized(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if weight.stack:
            return quantized_moe.placed(weight, parts)
        if weight.shared and len(weight.parts) == 1:
            return self._once(weight, parts, lambda: self._laid(weight, parts))
        return self._laid(weight, parts)

    def _once(self, weight: Weight, parts: Mapping[str, Tensor], make: Packing) -> Mapping[str, Tensor]:
        """A tied head and its table live on the same memory."""
        part = weight.parts[0]
        key = weight.form, weight.dtype, weight.axis, part.offset, part.ranges[weight.rank]
        found: dict[Any, Mapping[str, Tensor]] = self._shared.setdefault(parts[next(iter(weight.stored))], {})
        if key not in found:
            found[key] = make()
        return found[key]

    def _laid(self, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not _lays(weight):
            return attributes(blocks.canonical(weight, parts))
        try:
            if quantized_moe.quantizes(weight):
                return quantized.pack(weight.local(parts), weight.form)
            if blocks.lays(weight):
                return blocks.laid(weight, parts)
            return packer_of(weight.form).laid(blocks.canonical(weight, parts))
        except ValueError as error:
            done = "quantized" if weight.reader is None else "packed"
            raise ValueError(f"{weight.parts[0].source} cannot be {done}: {error}") from None

    def estimate(self, model: nn.Module, weights: Sequence[Weight], extent: Extent) -> Estimate:
        rows = 0 if self._config.enforce_eager else min(extent.most.rows, MOST_TOKENS)
        captured = rows * extent.vocab * 4  # recorded steps of all sizes give their logits in the same place
        return Estimate(sum(map(self._placed_bytes, weights)), extent.workspace, captured)

    def _placed_bytes(self, weight: Weight) -> int:
        if not weight.form.plain:
            if weight.stack:
                return quantized_moe.placed_bytes(weight)
            return quantized_moe.packed_bytes(weight) if _lays(weight) else weight.nbytes
        if weight.use.endswith("experts") and native_moe.packs(weight):
            return native_moe.packed_bytes(weight)
        if native_heads.packs(weight):
            return native_heads.packed_bytes(weight)
        if _packs() and (weight.use == "linear" or _looks_up_packed(weight)):
            return native_linear.packed_bytes(weight.shape, weight.dtype)
        return weight.nbytes

    def compile(self, model: nn.Module, variants: Iterable[Variant]) -> Step:
        size = sum(weight.numel() for weight in model.parameters())
        extension = _extension()
        most = self._threads or _shared_out(num_ranks(self._config))
        # torch's threads spin on our cores after each of its ops: where the products are ours, it gets one
        torchs = 1 if _packs() or size < WORTH_THREADS else most

        eager = extension is None or self._config.enforce_eager or not getattr(model, "recordable", True)
        comm = self._comm
        if comm is None:
            run = model if eager else Replay(model, extension)
        else:  # of ranks that are threads the platform does not know whose the model is: they record nothing
            run = model if eager or self._threaded else Replay(model, extension, comm.all_agree)

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

        return step if comm is None else naming_the_lost()(step)

    def profile(self, tell: Tell) -> Recording:
        self._tell = tell

        def stop() -> None:
            self._tell = None

        return Recording(HOW, stop)


@functools.cache
def _placing() -> str:
    """Tiles are the compiled extension's, and so is the choice of scales, which may differ by instruction set."""
    extension = _extension()
    if extension is None:
        return "torch"
    state = os.stat(extension.__file__)
    return f"{extension.__file__} {state.st_size} {state.st_mtime_ns} {read_environment().cpu_isa or extension.isa()}"


def _rounding(config: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """What int8 and int4 mean here: products of bytes, unless the user wants activations as they are."""
    if config.quantization not in ("int8", "int4") or config.activation_bits is not None:
        return config, []
    reason = (
        f"activation_bits=8: quantization={config.quantization!r} multiplies bytes here, with activations rounded for "
        "each group of weights: prompts and batches are up to twice as fast; 16 leaves activations as they are"
    )
    return config.replace(activation_bits=8), [reason]


def _sharing(config: EngineConfig) -> list[str]:
    """How ranks and engines run here. ValueError where they cannot."""
    stages, engines, all_of_them = config.pipeline_parallel_size, config.engines_of_machine, num_ranks(config)
    ranks = config.tensor_parallel_size * stages
    if ranks * engines == 1:
        return []
    asked = "tensor_parallel_size" if stages == 1 else "pipeline_parallel_size"
    if ranks > 1 and _extension() is None:
        raise ValueError(f"{asked} must be 1: {NO_RANKS}")
    if ranks > MOST_RANKS:
        of = f" x tensor_parallel_size {ranks // stages}" if stages > 1 and ranks > stages else ""
        given = getattr(config, asked)
        raise ValueError(f"{asked} {given}{of}: at most {MOST_RANKS} ranks share a host's memory; lower it")
    share = f"with {_shared_out(all_of_them)} of {_granted()} threads"
    reasons = [f"{engines} engines: a process each, {share}, that share the requests"] if engines > 1 else []
    started = STARTED.get(config.distributed_executor_backend or "", "")
    if config.nnodes > 1 or started:
        machines = f" on {config.nnodes} machines" if config.nnodes > 1 else ""
        where = "" if started else f", that meet at {config.master_addr}:{config.master_port}"
        reasons.append(
            f"{ranks} ranks{machines}: a process each{started}, {share}{where}; communicator: TCP, sums in rank order"
        )
    elif ranks > 1:
        staged = f" in {stages} stages" if stages > 1 else ""
        reasons.append(
            f"{ranks} ranks{staged}: a process each, {share}; communicator: shared memory, sums in rank order"
        )
    reasons[-1] += seats.seats_said(config)
    short = f"; there are fewer cores ({threads()}) than ranks, which wait for one"
    return [*reasons[:-1], reasons[-1] + (short if threads() < all_of_them else "")]


def _eager(model: nn.Module, state: State, batch: Batch) -> tuple[Outputs, State]:
    result: tuple[Outputs, State] = model(state, batch)
    return result


def _looks_up_packed(weight: Weight) -> bool:
    """Whether rows of a table can be looked up in the form that products want: a tied head is then held once.

    Not where ranks share the table out: each looks up its own rows, and knows them by their first.
    """
    alone = len(weight.parts) == 1 and len(weight.parts[0].ranges) == 1 and len(weight.shape) == 2
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
def _packs() -> bool:
    """Whether products are our own, so that weights had better lie as they want them."""
    return native_linear.probe() is None


def _looks_up() -> bool:
    """Whether rows are found in what our products read."""
    return _packs() and quantized_rows.probe() is None


def _lays(weight: Weight) -> bool:
    return quantized_moe.lays(weight.form, weight.shape[1])


def _extension() -> Any:
    """quintet._cpu, or None where it was not compiled."""
    try:
        from quintet import _cpu
    except ImportError:
        return None
    return _cpu if hasattr(_cpu, "limit_threads") else None


@functools.cache
def _granted() -> int:
    """Threads for large models: the cores that are ours, or fewer if OMP_NUM_THREADS or the caller said so before."""
    return min(torch.get_num_threads(), threads())


def _shared_out(ranks: int) -> int:
    """Threads of each of so many ranks."""
    return max(1, _granted() // ranks)
