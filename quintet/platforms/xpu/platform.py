"""Platform of Intel GPUs. No step has run on one yet: it reports that when it is chosen."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.interface.platform import Device, Unavailable
from quintet.interface.types import RankInfo
from quintet.interface.weights import Weight, WeightFormat
from quintet.ops.registry import of_kind
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.platform import GPU
from quintet.platforms.gpu.runtime import Runtime
from quintet.platforms.xpu import facts, onednn
from quintet.platforms.xpu.runtime import XPURuntime


class XPU(GPU):
    """Triton's kernels, oneDNN's products of whole numbers through torch, torch for the rest."""

    name = "xpu"
    op_priority = {**providers.PRIORITY, "experts": ("triton",), "linear:fp8a8": ("triton",), **onednn.PRIORITY}
    _collectives = "XCCL"

    @classmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        return facts.facts()

    @classmethod
    def _make_runtime(cls) -> Runtime:
        return XPURuntime(torch.xpu)

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """Steps run eagerly where this torch does not capture them soundly."""
        config, reasons = super().configure(config)
        found = cls._facts()
        assert isinstance(found, GPUFacts), "configured, though it is not available"
        why = facts.ungraphed(found.names, torch.__version__)
        if config.tensor_parallel_size > 1:
            why = why or "collectives of XCCL cannot be captured (pytorch #196490)"
        if why is None or config.enforce_eager:
            return config, reasons
        return config.replace(enforce_eager=True), [*reasons, f"no step is captured: {why}"]

    def open(self, rank: int) -> Device:
        onednn.register()
        return super().open(rank)

    def _small_all_reduce(self, store: Any, rank_info: RankInfo) -> None:
        """There is no kernel for them."""

    def _is_packed(self, fmt: WeightFormat) -> bool:
        """As Triton's kernels want four bits; oneDNN reads them as the specification has them."""
        return super()._is_packed(fmt) and not self._by_library(fmt)

    def _by_library(self, fmt: WeightFormat) -> bool:
        first = self.op_priority.get(of_kind("linear", fmt.kind), ("",))[0]
        return first == "onednn" and fmt.kind == "int4" and onednn.supports(fmt) and onednn.probe_int4() is None

    def _quantized(self, device: GPUDevice, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        placed = super()._quantized(device, weight, parts)
        return onednn.pack(placed, weight.dtype) if self._by_library(weight.format) else placed
