"""Memory of models before they are loaded: a child process plans them as an engine does, without reading weights."""

import asyncio
import logging
import subprocess
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from quintet.common.processes import Child
from quintet.router.models.config import ModelSpec
from quintet.router.models.models_file import plain_fields
from quintet.router.models.planner import ModelSize

logger = logging.getLogger(__name__)

GIB = 2**30
MODULE = "quintet.router.models.estimate_process"
# bytes of an engine's two processes besides weights, workspace and KV cache, where they are in the same memory
PROCESS_BYTES = 384 * 2**20
_MAX_LINE = 2**20  # bytes of an estimate
_CACHE_REQUESTS = 4  # requests of max_model_len that a KV cache holds if no setting sizes it, up to
_CACHE_SHARE = 8  # this part of the budget, but one request at least


class EstimateOrders(msgspec.Struct):
    """Start orders of the process that plans."""

    engines: list[dict[str, Any]]  # EngineConfig's fields


class MemoryEstimate(msgspec.Struct):
    """Bytes of one model on its device; or why it cannot be planned."""

    error: str = ""
    weights: int = 0
    workspace: int = 0  # and captured steps
    kv_cache: int = 0  # as large as it is useful
    kv_cache_least: int = 0  # of one request of max_model_len
    max_model_len: int = 0  # tokens
    sleeps: bool = False  # the engine can sleep
    in_host_memory: bool = False  # the device's memory is the host's
    free: int = 0  # of the device
    total: int = 0

    @property
    def fixed(self) -> int:
        """Bytes besides the KV cache."""
        return self.weights + self.workspace + PROCESS_BYTES * self.in_host_memory


class EngineMemory(msgspec.Struct):
    """Decision about one engine's memory."""

    size: ModelSize
    kv_cache_bytes: int | None  # None: its settings size the cache
    sleeps: bool


async def estimate_models(specs: Sequence[ModelSpec]) -> AsyncGenerator[tuple[int, MemoryEstimate], None]:
    """Yields the index and the estimate of each model as soon as it is planned; models whose files have to be
    downloaded come last. One process plans all, so that torch is imported once."""
    child = Child(MODULE, EstimateOrders([plain_fields(each.engine) for each in specs]), stdout=subprocess.PIPE)
    loop, missing = asyncio.get_running_loop(), set(range(len(specs)))
    try:
        while line := await loop.run_in_executor(None, child.stdout.readline, _MAX_LINE):
            index, estimate = msgspec.json.decode(line, type=tuple[int, MemoryEstimate])
            missing.remove(index)
            yield index, estimate
    except BaseException:  # the server ends
        child.kill()  # it may load libraries, and would notice nothing meanwhile
        raise
    finally:
        child.close()
    for index in sorted(missing):
        yield index, MemoryEstimate(error=f"the process that plans its memory has ended: {child.exit}")


def default_budget(estimate: MemoryEstimate, utilization: float, wanted: int | float | str | None) -> int:
    """Returns the bytes for all models on the device of an estimate; `utilization`: the share that may be used."""
    if isinstance(wanted, int):
        return wanted
    if wanted is not None:
        return int(estimate.total * float(wanted))
    return min(estimate.free, int(estimate.total * utilization))


def engine_memory(spec: ModelSpec, estimate: MemoryEstimate, budget: int) -> EngineMemory:
    """Returns the bytes of a model's engine, and of its KV cache. ValueError with the numbers if `memory` is less than
    it needs."""
    cache: int | None = estimate.kv_cache
    if spec.memory is not None:
        total = int(spec.memory * estimate.total) if isinstance(spec.memory, float) else spec.memory
        if not spec.cache_is_sized:
            cache = min(estimate.kv_cache, total - estimate.fixed)
            if cache < estimate.kv_cache_least:
                least = estimate.fixed + estimate.kv_cache_least
                raise ValueError(
                    f"memory={total / GIB:.2f} GiB of the model {spec.name!r} is less than the {least / GIB:.2f} GiB "
                    "that it needs for one request of max_model_len; raise it, or lower max_model_len"
                )
    elif spec.cache_is_sized:
        total = estimate.fixed + estimate.kv_cache
    else:
        several = _CACHE_REQUESTS * estimate.kv_cache_least if spec.engine.max_model_len != "auto" else budget
        cache = min(estimate.kv_cache, max(estimate.kv_cache_least, min(several, budget // _CACHE_SHARE)))
        total = estimate.fixed + cache
    asleep = total - estimate.kv_cache if spec.cache_is_sized else total - (cache or 0)
    size = ModelSize(total, max(0, asleep) if estimate.in_host_memory else 0)
    return EngineMemory(size, None if spec.cache_is_sized or not cache else cache, estimate.sleeps)
