"""Platform of AMD GPUs. No step has run on one yet: it reports that when it is chosen."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.interface.platform import Mixer, Unavailable
from quintet.interface.types import AttentionSpec, RankInfo
from quintet.interface.weights import Weight
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.attention import PlannerRegistry
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.fp8_fnuz import FN, FNUZ, as_fnuz
from quintet.platforms.gpu.platform import GPU
from quintet.platforms.gpu.runtime import Runtime, TorchRuntime
from quintet.platforms.rocm import aiter, facts

logger = logging.getLogger(__name__)


class ROCm(GPU):
    """AITER's kernels where they serve, Triton's, and torch, which calls HIP and RCCL by CUDA's names."""

    name = "rocm"
    op_priority = {op: ("aiter",) * (op in aiter.OPS) + tuple(order) for op, order in providers.PRIORITY.items()}

    @classmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        return facts.facts()

    @classmethod
    def _make_runtime(cls) -> Runtime:
        return TorchRuntime(torch.cuda, "cuda")

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """Steps run eagerly where graphs are reported to crash, unless a setting asks for captures."""
        config, reasons = super().configure(config)
        found = cls._facts()
        assert isinstance(found, GPUFacts), "configured, though it is not available"
        asked = config.capture_ahead or config.capture_sizes or config.max_capture_size
        if not found.eager_reason or asked or config.enforce_eager:
            return config, reasons
        reason = f"no step is captured: {found.eager_reason}; max_capture_size=512 captures all the same"
        return config.replace(enforce_eager=True), [*reasons, reason]

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        found = self._facts()
        self._fp8 = found.fp8 if isinstance(found, GPUFacts) else None
        self._tried: dict[AttentionSpec, str | None] = {}

    def _quantized(self, device: GPUDevice, weight: Weight, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Checkpoints are in OCP's fp8, and so is what is quantized while it is loaded."""
        placed = super()._quantized(device, weight, parts)
        return as_fnuz(placed) if self._fp8 == FNUZ and placed["weight"].dtype == FN else placed

    def _library_mixer(self, spec: AttentionSpec, ops: Any, rank: int, planning: PlannerRegistry) -> Mixer | str:
        """AITER's attention for such layers, or every reason why not; each kind of layer is tried once."""
        if reasons := aiter.refusals(spec):
            return f"AITER does not serve {', '.join(reasons)}"
        if spec not in self._tried:
            self._runtime.use(rank)
            self._tried[spec] = aiter.trial(spec, self._runtime.empty((0,), torch.uint8, rank).device)
        return self._tried[spec] or aiter.mixer(spec, ops)

    def _small_all_reduce(self, store: Any, rank_info: RankInfo) -> None:
        """The kernel of csrc/cuda has no build for HIP."""
        if rank_info.rank == 0:
            logger.info("all sums are left to RCCL: there is no kernel of our own for small ones under HIP")
