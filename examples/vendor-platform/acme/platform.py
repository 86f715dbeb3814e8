"""The platform: what quintet asks of Acme devices, by its own words (quintet/interface/platform.py)."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from quintet.contract import (
    AttentionSpec,
    Capabilities,
    Communicator,
    Device,
    EngineConfig,
    Mixer,
    PlainAttention,
    Platform,
    RankInfo,
    ShapeBucket,
    SingleRank,
    Step,
    Unavailable,
    Weight,
    attributes,
    canonical,
)
from torch import Tensor, nn

from acme.attention import AcmeAttention
from acme.chip import CHIP, FP8
from acme.comm import AcmeCommunicator, Room
from acme.compile import compiled
from acme.device import AcmeDevice
from acme.ops import PRIORITY

MIB = 2**20
KV_MOST = 128 * MIB  # of an emulated device's memory, where nothing was asked for


class Acme(Platform):
    """One instance serves one engine; its ranks are threads of this process, each with a device."""

    name = "acme"
    contract = 3
    op_priority = PRIORITY
    layers = {"GatedMLP": "acme.layers:FusedMLP"}
    models = {"llama": "acme.llama:AcmeLlamaForCausalLM"}

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self._lock = threading.Lock()
        self._devices: dict[int, AcmeDevice] = {}
        self._rooms: dict[str, Room] = {}

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        if CHIP.broken:
            return Unavailable(f"the driver says: {CHIP.broken}", "mend what ACME_CHIP names")
        return Capabilities(
            devices=CHIP.devices,
            dtypes=(torch.bfloat16, torch.float32, torch.float16),
            fp8=FP8,
            weight_formats=frozenset({"int8"}),
            static_shapes=True,
            ops_only=True,
            overlap=True,
            lora=True,
            batch_invariant=True,
            auto_select=False,  # a real device leaves this out
            detail=f"{CHIP.devices} emulated devices of {CHIP.memory // MIB} MiB",
        )

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        if config.tensor_parallel_size > CHIP.devices:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} needs as many devices, {CHIP.devices} here; "
                "lower it"
            )
        reasons = []
        if config.enforce_eager:
            reasons.append("enforce_eager: nothing runs uncaptured here; steps are captured all the same")
        if config.kv_cache_memory_bytes is None and config.num_pages is None:
            share = min(KV_MOST, CHIP.memory // 4)
            config = config.replace(kv_cache_memory_bytes=share)
            reasons.append(f"kv_cache_memory_bytes={share} ({share / MIB:.0f} MiB): nothing was asked for")
        return config, reasons

    def open(self, rank: int) -> Device:
        with self._lock:
            if rank not in self._devices:
                self._devices[rank] = AcmeDevice(rank)
            return self._devices[rank]

    def connect(self, rank_info: RankInfo) -> Communicator:
        if rank_info.size == 1:
            return SingleRank()
        with self._lock:
            room = self._rooms.setdefault(rank_info.endpoint, Room(rank_info.size))
        if room.size != rank_info.size or rank_info.rank >= rank_info.size:
            raise ValueError(f"{rank_info}, where {room.size} ranks meet")
        room.meet()
        return AcmeCommunicator(room, rank_info.rank)

    def mixer(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer:
        return PlainAttention(spec, ops) if spec.source == "none" else AcmeAttention(spec)

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        if not weight.format.plain:
            packed = attributes(canonical(weight, parts))
        elif weight.use == "linear":
            packed = {weight.name: weight.local(parts).to(weight.dtype).t()}  # [K, N], as kernels.product wants it
        else:
            packed = {weight.name: weight.local(parts).to(weight.dtype)}
        device = self._devices[weight.rank]
        if into is None:
            return {name: device.upload(each, "weights") for name, each in packed.items()}
        for name, each in packed.items():
            device.overwrite(into[name], each, weight.rows)
        return {name: into[name] for name in packed}

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        return compiled(model, buckets)
