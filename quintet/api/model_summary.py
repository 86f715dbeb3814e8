"""Facts of a model from its files' headers: parameters, context, quantization, and the memory that it needs here."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from quintet.config import EngineConfig
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.memory_planner import GIB
from quintet.engine.startup import prepare
from quintet.gguf.file_choice import quantization_label
from quintet.interface.types import Memory
from quintet.model_loader.gguf_weights import model_of
from quintet.model_loader.loader import tensors_of
from quintet.model_loader.weight_files import weights_of

DEFAULT_TOKENS = 4096  # of the KV cache, where max_model_len is not given
_MANY_PAGES = 10**7  # no limit: nothing is allocated


@dataclass(frozen=True)
class ModelSummary:
    """Facts of a model. Bytes are those of one device."""

    model: str
    path: str
    family: str
    parameters: int | None  # None: weights are packed, so that shapes do not tell
    context: int  # tokens
    quantization: str
    file_size: int
    weights: int
    workspace: int
    kv_cache: int  # of one request with kv_tokens
    kv_tokens: int
    usable: int  # by gpu_memory_utilization, and free
    memory: Memory

    @property
    def needed(self) -> int:
        """Bytes for one request of kv_tokens."""
        return self.weights + self.workspace + self.kv_cache

    @property
    def fits(self) -> bool:
        """True if one request of kv_tokens can run."""
        return self.needed <= self.usable

    def __str__(self) -> str:
        count = [] if self.parameters is None else [f"parameters    {_count(self.parameters)}"]
        return "\n".join(
            [
                f"model         {self.model}",
                *([f"path          {self.path}"] if self.path != self.model else []),
                f"family        {self.family}",
                *count,
                f"context       {self.context:,} tokens",
                f"quantization  {self.quantization}",
                f"files         {_gib(self.file_size)}",
                f"memory        {self._memory_line()}",
            ]
        )

    def _memory_line(self) -> str:
        cache = f" + KV cache of {self.kv_tokens:,} tokens {_gib(self.kv_cache)}" if self.kv_cache else ""
        sums = f"weights {_gib(self.weights)} + workspace {_gib(self.workspace)}{cache}"
        room = f"of {_gib(self.usable)} ({_gib(self.memory.free)} free, {_gib(self.memory.total)} in all)"
        if self.fits:
            return f"fits: {sums} {room}"
        return (
            f"does not fit: {sums} is {_gib(self.needed)}, {room}; a smaller quantization or --max-model-len needs less"
        )


def summarize(config: EngineConfig, path: Path) -> ModelSummary:
    """Reads the headers of a model's files. ValueError and OSError say why it cannot run here at all."""
    plan = prepare(dataclasses.replace(_planned(config), model=str(path)), met=False)
    try:
        worker, model_memory = plan.ranks.workers[0], plan.memory_plan.model_memory
        memory = worker.device.memory()
    finally:
        plan.ranks.close()
    length = plan.memory_plan.max_model_len
    tokens = length if isinstance(config.max_model_len, int) else min(DEFAULT_TOKENS, length)
    pages = (model_memory.pages_for(tokens, config.page_size) + 1) * model_memory.page_bytes
    weights = weights_of(plan.config, path)
    return ModelSummary(
        model=config.model,
        path=str(path),
        family=plan.hf_config.model_type,
        parameters=_parameters(plan),
        context=plan.sizes.max_model_len,
        quantization=_quantization(plan, path),
        file_size=sum(each.stat().st_size for each in weights.files()),
        weights=model_memory.estimate.weights,
        workspace=model_memory.estimate.workspace + model_memory.estimate.captured,
        kv_cache=pages * bool(model_memory.page_bytes) + 2 * model_memory.kv_cache_layout.slot_bytes,
        kv_tokens=tokens,
        usable=min(int(memory.total * config.gpu_memory_utilization), memory.free),
        memory=memory,
    )


def _planned(config: EngineConfig) -> EngineConfig:
    """Returns the settings with which a plan never fails for lack of memory."""
    length = "auto" if config.max_model_len is None else config.max_model_len
    return config.replace(num_pages=_MANY_PAGES, kv_cache_memory_bytes=None, max_model_len=length)


def _parameters(plan: EnginePlan) -> int | None:
    if plan.folder.is_file():
        return sum(int(math.prod(each.shape)) for _, each in model_of(plan.folder).tensors.values())
    stored = tensors_of(weights_of(plan.config, plan.folder), type(plan.ranks.workers[0].model)).values()
    shapes = [each.shape for each in stored if each.shape is not None]
    packed = any(not dtype.is_floating_point for each in stored for dtype in each.dtypes)
    return None if packed or len(shapes) < len(stored) else sum(int(math.prod(each)) for each in shapes)


def _quantization(plan: EnginePlan, path: Path) -> str:
    label = quantization_label(path.name) if path.is_file() else None
    reason = next((each for each in plan.reasons if each.startswith("checkpoint quantized by ")), None)
    kinds = reason.partition(": ")[0].removeprefix("checkpoint quantized by ") if reason else ""
    return ": ".join(filter(None, (label, kinds))) or str(plan.sizes.dtype).removeprefix(f"{torch.__name__}.")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
