"""Platform of NVIDIA GPUs. It reports what is unverified when it is chosen."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.interface.platform import Mixer, Unavailable
from quintet.interface.types import AttentionSpec, MaxShape, RankInfo, ShapeBucket
from quintet.platforms.cuda import cudnn_attention, facts, flashinfer
from quintet.platforms.cuda import symm_mem_all_reduce as symmetric_sum
from quintet.platforms.gpu.attention import PlannerRegistry
from quintet.platforms.gpu.comm import SmallAllReduce
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.platform import GPU
from quintet.platforms.gpu.runtime import Runtime, TorchRuntime

logger = logging.getLogger(__name__)


class CUDA(GPU):
    """Triton's kernels, FlashInfer's attention where it is installed and serves, torch for the rest."""

    name = "cuda"
    _mp = True
    _unverified = "unverified but on one H100, without FlashInfer; please report what you see"

    @classmethod
    def _facts(cls) -> GPUFacts | Unavailable:
        return facts.facts()

    @classmethod
    def _make_runtime(cls) -> Runtime:
        return TorchRuntime(torch.cuda, "cuda")

    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """FlashInfer is no provider of an op: what asks for it gets the order that has it first, if it is there."""
        config, reasons = super().configure(config)
        if config.attention_backend != "flashinfer":
            return config, reasons
        if isinstance(found := flashinfer.load(), str):
            raise ValueError(f"attention_backend='flashinfer' does not serve: {found}; or leave it out")
        reason = "attention_backend=flashinfer: as auto, where it comes first; layers that it does not serve are logged"
        return config.replace(attention_backend="auto"), [*reasons, reason]

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self._planners: dict[tuple[int, AttentionSpec], flashinfer.FlashInferPlanner | str] = {}
        self._prompts: dict[AttentionSpec, str | None] = {}  # None: whole prompts run on cuDNN; else why not
        self._spaces: dict[int, Tensor] = {}  # by rank: FlashInfer's workspace, for one layer after the other

    def _process_all_reduce(self, store: Any, rank_info: RankInfo) -> SmallAllReduce | str:
        library = symmetric_sum.load(torch.device("cuda", rank_info.rank))
        return symmetric_sum.join(library, store, rank_info.rank, rank_info.size, f"quintet {rank_info.endpoint}")

    def _library_mixer(self, spec: AttentionSpec, ops: Any, rank: int, planning: PlannerRegistry) -> Mixer | str:
        if (rank, spec) not in self._planners:
            self._planners[rank, spec] = self._planner(spec, rank)
        planner = self._planners[rank, spec]
        if isinstance(planner, str):
            return planner
        planning.add(spec, planner)
        return flashinfer.mixer(spec, ops, planner)

    def _prompt_mixer(self, spec: AttentionSpec, ops: Any, rank: int) -> Mixer | None:
        """cuDNN's attention, where our kernels have the rest."""
        sizes = cudnn_attention.sizes(self._config.step_tokens)
        if not sizes or ops.choice("paged_attention").provider != "triton":
            return None
        if self._why_not_cudnn(spec, rank, (sizes[0], sizes[-1])) is not None:
            return None
        self._planning[rank].serves_whole_prompt = lambda tokens: cudnn_attention.size_for(tokens, sizes) is not None
        return cudnn_attention.mixer(spec, ops, sizes)

    def _why_not_cudnn(self, spec: AttentionSpec, rank: int, sizes: Sequence[int]) -> str | None:
        """Tries each kind of layer once, with prompts of these sizes."""
        with self._trying:
            if spec not in self._prompts:
                self._runtime.use(rank)
                device = self._runtime.empty((0,), torch.uint8, rank).device
                tried = (cudnn_attention.trial(spec, device, size) for size in sorted(set(sizes)))
                wrong = ", ".join(cudnn_attention.refusals(spec)) or next(filter(None, tried), None)
                self._prompts[spec] = wrong
                logger.info("whole prompts by cuDNN: %s", wrong or f"yes, for {spec}")
            return self._prompts[spec]

    def _planner(self, spec: AttentionSpec, rank: int) -> "flashinfer.FlashInferPlanner | str":
        """Returns FlashInfer's planner for such layers, or every reason why not."""
        module = self._flashinfer()
        if isinstance(module, str):
            return module
        if reasons := flashinfer.refusals(spec):
            return f"FlashInfer does not serve {', '.join(reasons)}"

        def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return self._runtime.empty(shape, dtype, rank)

        def mark() -> Callable[[], None]:
            event = self._runtime.event()
            event.record(self._runtime.current())
            return event.synchronize

        self._runtime.use(rank)
        if rank not in self._spaces:
            self._spaces[rank] = empty((flashinfer.WORKSPACE,), torch.uint8).zero_()  # its counters begin at 0
        means = flashinfer.DeviceFunctions(empty, self._spaces[rank], mark, self._runtime.pinned, self._runtime.copy)
        wrong = flashinfer.trial(spec, module, means)
        return wrong or flashinfer.FlashInferPlanner(spec, module, means, self._sizes)

    def _library_bytes(self, buckets: Sequence[ShapeBucket], max_shape: MaxShape) -> int:
        planners = [each for each in self._planners.values() if not isinstance(each, str)]
        ranks = len({rank for rank, _ in self._planners})
        planned = flashinfer.planned_bytes(buckets, len(max_shape.largest.pages)) * -(-len(planners) // max(1, ranks))
        served = [spec for spec, why in self._prompts.items() if why is None]
        most = [cudnn_attention.nbytes(spec, self._config.step_tokens) for spec in served]
        return planned + max(most, default=0)

    def _flashinfer(self) -> Any:
        """The module, or the reason why there is none."""
        return flashinfer.load()
