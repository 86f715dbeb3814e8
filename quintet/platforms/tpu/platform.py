"""TPUs as a platform: torch models traced into XLA programs. On a machine without one, JAX's CPU devices stand in."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quintet.config import EngineConfig
from quintet.config.cache_dir import cache_folder, unsafe_reason
from quintet.distributed.rendezvous import RendezvousTerms
from quintet.interface.platform import (
    Capabilities,
    Communicator,
    Device,
    Mixer,
    Platform,
    SingleRank,
    Step,
    Unavailable,
)
from quintet.interface.types import AttentionSpec, Estimate, MaxShape, RankInfo, ShapeBucket, StateSpec
from quintet.interface.weights import Weight
from quintet.ops.linear import KINDS
from quintet.platforms.host import host_memory
from quintet.platforms.tpu.facts import TPUFacts, facts
from quintet.platforms.tpu.multi_host import MultiHostCommunicator, PendingDevice, devices_of_all, start_multi_host

logger = logging.getLogger(__name__)

GIB = 2**30
MAX_CACHE_BYTES = 4 * GIB  # of programs on disk; those that were not used for longest go first
HOST_KV = GIB // 2  # of host memory for the cache, where the processor stands in and nothing was asked for
PAGED = ("write_kv", "paged_attention")


class TPU(Platform):
    """One worker drives all devices: place() shards, XLA adds the collectives. Steps are compiled, shapes are fixed."""

    name = "tpu"
    optional_spec_fields = frozenset({"chunk", "cross"})
    op_priority = dict.fromkeys(PAGED, ("pallas", "jax")) | dict.fromkeys(
        (
            *("attention", "take_rows", "place_rows", "choose_rows", "beside", "by_heads"),
            *(
                "linear",
                "add_lora",
                "scale_adapted",
                "adapter_rows",
                "embedding",
                "rotary",
                "pair_rotary",
                "rms_norm",
                "add_rms_norm",
                "layer_norm",
                "activate",
                "gated",
            ),
            *("route", "route_grouped", "route_limited", "grouped_linear", "experts", "biased_experts"),
            *("delta_rule", "kimi_delta_rule", "selective_scan", "short_conv", "state_space"),
            *("greedy", "sample", "gumbel", "scale_logits", "filter_logits", "top_logprobs", "widen"),
            *("penalize", "bias_tokens", "ban_tokens", "keep_tokens", "place_tokens", "gather_pages", "scatter_pages"),
        ),
        ("jax",),
    )
    encoder_platform = "cpu"
    supports_states = True

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        found = facts()
        if isinstance(found, Unavailable):
            return found
        return Capabilities(
            devices=found.devices,
            dtypes=(torch.bfloat16, torch.float32),
            weight_formats=frozenset({*KINDS, "mins", "grouped"}),
            static_shapes=True,
            ops_only=True,
            spmd=True,
            overlap=True,
            lora=True,
            multi_host=True,
            auto_select=found.chips > 0,
            detail=found.detail,
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        found, reasons = facts(), []
        assert isinstance(found, TPUFacts), "configured, though it is not available"
        here = config.tensor_parallel_size // config.nnodes
        if here > found.devices:
            of = f", {here} on each of {config.nnodes} machines" if config.nnodes > 1 else ""
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs as many devices{of}, {found.devices} here"
                + ("; lower it" if found.chips else "; XLA_FLAGS=--xla_force_host_platform_device_count=N gives more")
            )
        if config.enforce_eager:
            reasons.append("enforce_eager: nothing runs uncompiled here; the steps are compiled all the same")
        if config.compilation_cache_dir == "auto":
            folder, reason = _cache_folder()
            config = config.replace(compilation_cache_dir=folder)
            reasons.append(f"compilation_cache_dir={folder}: {reason}")
        elif config.compilation_cache_dir != "none" and (why := unsafe_reason(Path(config.compilation_cache_dir))):
            raise ValueError(f"compilation_cache_dir {why}; choose another folder, or none")
        if not found.chips and config.kv_cache_memory_bytes is None and config.num_pages is None:
            share = min(HOST_KV, int(host_memory().free * config.gpu_memory_utilization / 2))
            share //= here
            config = config.replace(kv_cache_memory_bytes=share)
            reasons.append(f"kv_cache_memory_bytes={share} ({share / GIB:.1f} GiB): host memory, nothing was asked for")
        return config, reasons

    def open(self, rank: int) -> Device:
        """All devices that the config asks for, as one. Starts the runtime; of several machines, when they meet."""
        import jax

        found = facts()
        assert isinstance(found, TPUFacts), "opened, though it is not available"
        self._kind = "tpu" if found.chips else "cpu"
        if self._kind == "cpu":
            jax.config.update("jax_platforms", self._kind)  # or it would look for, and take, what else is there
        if self._config.nnodes > 1:
            self._awaited = PendingDevice()
            return self._awaited
        return self._opened(jax.devices(self._kind)[: self._config.tensor_parallel_size])

    def _opened(self, devices: Sequence[Any], machines: MultiHostCommunicator | None = None) -> Device:
        from quintet.platforms.tpu import providers  # noqa: F401  registers them
        from quintet.platforms.tpu.compile import ProgramWeights
        from quintet.platforms.tpu.device import TPUDevice
        from quintet.platforms.tpu.sharding import Placer

        _keep_programs(self._config.compilation_cache_dir)
        self._device = TPUDevice(devices, machines)
        self._placer = Placer(self._device.mesh)
        self._planner: Mixer | None = None  # the last that keeps pages: its plan depends on the page size alone
        self._weights: dict[nn.Module, ProgramWeights] = {}  # of each model that was compiled
        return self._device

    def connect(self, rank_info: RankInfo) -> Communicator:
        if self._config.nnodes == 1:
            return SingleRank()
        import jax

        here = self._config.tensor_parallel_size // self._config.nnodes
        if not rank_info.endpoint:  # nothing will run: a machine's own devices show what each has
            self._awaited.opened = self._opened(jax.devices(self._kind)[:here])
            return SingleRank()
        found = facts()
        assert isinstance(found, TPUFacts), "connected, though it is not available"
        config = self._config
        terms = RendezvousTerms(config.distributed_timeout_seconds, config.join_timeout_seconds, config.nnodes)
        machines = start_multi_host(rank_info, found, terms)
        devices = devices_of_all(jax.devices(self._kind), here)
        self._awaited.opened = self._opened(devices, machines)
        return machines

    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        from quintet.platforms.tpu.attention import mixer
        from quintet.platforms.tpu.states import JaxStates

        if isinstance(spec, StateSpec):
            if ops.choice(spec.op).provider == "reference":  # which asks for the longest request's tokens
                raise ValueError(
                    f"{spec.op} of states has no program of fixed shapes here; run this model on another platform"
                )
            return JaxStates(spec, ops, self._device.kind)
        made = mixer(spec, ops, self._device.mesh)
        self._planner = made if made.layouts else self._planner
        return made

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        from quintet.platforms.tpu.torchax_bridge import put, put_rows, torch_view

        placed = self._placer(weight, parts)
        if into is None:
            made: dict[str, Tensor] = torch_view(placed)
            return made
        for name, array in placed.items():
            if weight.rows is None:
                put(into[name], array)
            else:
                put_rows(into[name], array, *weight.rows)
        for weights in self._weights.values():
            weights.replaced = True
        return {name: into[name] for name in placed}

    def estimate(self, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        from quintet.platforms.tpu.device import shard_bytes
        from quintet.platforms.tpu.sharding import placements

        placed = (shard_bytes(p.shape) for w in weights for p in placements(w, self._device.mesh).values())
        return Estimate(sum(placed), max_shape.workspace)

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        from quintet.platforms.tpu.compile import Program, ProgramWeights, abstract, compile_step

        weights = self._weights[model] = ProgramWeights(dict(model.named_parameters()))
        shapes = {name: abstract(array) for name, array in weights.now().items()}
        device = self._device
        program = Program(model, shapes, device.state, self._planner, device.replicated, device.stateful)
        return compile_step(program, weights, buckets, device)


def _cache_folder() -> tuple[str, str]:
    """The user's, made if need be, and why; "none" if it cannot be."""
    folder = cache_folder("xla")
    if why := unsafe_reason(folder):
        return "none", f"{why}; each start compiles anew"
    return str(folder), "the next start finds its programs there"


def _keep_programs(folder: str) -> None:
    """Compiled programs go to the folder and are found there. JAX has one such folder per process."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    place = None if folder == "none" else folder
    try:
        if place is not None:
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("each start compiles anew: %s cannot be made (%s)", folder, error.strerror)
        place = None
    if jax.config.values["jax_compilation_cache_dir"] != place:
        jax.config.update("jax_compilation_cache_dir", place)
        compilation_cache.reset_cache()  # it was opened with the first compilation, wherever it lay then
    jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
