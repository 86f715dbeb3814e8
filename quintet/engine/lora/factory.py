"""Makes the parts of an engine that serve adapters (LoRA), by its settings."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from quintet.config import EngineConfig
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.lora.loaded import PackedAdapter
from quintet.engine.lora.manager import LoRALimits, LoRAManager, LoRARole, PackAdapter
from quintet.engine.lora.modules import matrices_of
from quintet.engine.pooling.adapted_heads import AdaptedHeads
from quintet.hub.dtypes import name_of
from quintet.interface.platform import Capabilities
from quintet.layers.lora import PackedLoRA
from quintet.layers.lora_step import LoRASizes
from quintet.lora.adapter import AdapterError, LoRAAdapter, LoRABounds, read_adapter
from quintet.lora.request import LoRAReference

AdaptHeads = Callable[[Mapping[str, torch.Tensor]], AdaptedHeads]  # of the tensors that an adapter holds whole


def lora_sizes(config: EngineConfig, facts: Capabilities, platform: str, dtype: torch.dtype) -> LoRASizes | None:
    """Returns the room for adapters on a device; None: they are off. ValueError if the platform has none."""
    if not config.enable_lora:
        return None
    if not facts.lora:
        raise ValueError(
            f"enable_lora: platform {platform} serves no adapters (Capabilities.lora is False); leave it out, or write "
            "the adapter into the model (quintet merge-lora)"
        )
    if config.lora_dtype not in ("auto", name_of(dtype)):
        raise ValueError(
            f"lora_dtype={config.lora_dtype!r}: adapters are held in the model's type, {name_of(dtype)}; leave it out, "
            "or set dtype"
        )
    return LoRASizes(
        config.max_loras, config.max_lora_rank, not facts.ops_only, config.lora_target_modules, facts.lora_experts
    )


def make_lora(config: EngineConfig, ranks: WorkerGroup, role: LoRARole, adapt_heads: AdaptHeads) -> LoRAManager | None:
    """Makes the engine's adapters; None: they are off."""
    if not config.enable_lora:
        return None
    limits = LoRALimits(config.max_loras, config.max_cpu_loras or config.max_loras)
    return LoRAManager(ranks, limits, adapter_reader(config, ranks, adapt_heads), role)


def adapter_reader(config: EngineConfig, ranks: WorkerGroup, adapt_heads: AdaptHeads) -> PackAdapter:
    """Returns what reads an adapter and packs it for each rank of this process; the weights need not be loaded."""
    bounds = LoRABounds(config.max_lora_rank)

    def pack(reference: LoRAReference) -> PackedAdapter:
        adapter = read_adapter(Path(reference.path), bounds)
        if adapter.digest != reference.digest:
            raise AdapterError(
                Path(reference.path),
                "has changed since it was loaded; load it again (load_inplace), or send the request again",
            )
        adapted = adapt_heads(adapter.saved)
        packed = [_packed(worker, adapter, adapted.used) for worker in ranks.workers]
        needs_base = any(each.magnitude is not None for each in adapter.modules.values())
        return PackedAdapter(packed, adapted.heads, needs_base)

    return pack


def _packed(worker: Worker, adapter: LoRAAdapter, in_heads: Collection[str]) -> PackedLoRA:
    assert worker.lora is not None
    matrices = matrices_of(adapter, worker.model, in_heads)
    needs_base = any(each.magnitude is not None for each in matrices.values())
    return worker.lora.pack(matrices, worker.main.checkpoint_reader() if needs_base else None)
