"""Process that plans the memory of models as their engines would, and writes an estimate a line to standard output."""

import dataclasses
import logging
import sys
import traceback
from collections.abc import Sequence

import msgspec

from quintet.common.processes import follow_parent, read_orders
from quintet.config import EngineConfig, read_environment
from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.startup import prepare
from quintet.hub.resolve import resolve_model
from quintet.model_loader.external_loaders import STORE_SCHEMES
from quintet.model_loader.weight_files import weights_of
from quintet.router.models.estimates import EstimateOrders, MemoryEstimate

_ALL = 1 << 50  # bytes: a plan with so much for the KV cache asks for as much as is useful, whatever is free now


def main() -> int:
    """Plans each model in turn, and writes its index with its estimate."""
    orders = read_orders(EstimateOrders)
    follow_parent()
    logging.disable(logging.WARNING)  # the engine itself logs them
    configs = [EngineConfig(**fields) for fields in orders.engines]
    for index in local_first(configs):
        sys.stdout.buffer.write(msgspec.json.encode((index, _estimate(configs[index]))) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def local_first(configs: Sequence[EngineConfig]) -> list[int]:
    """Returns the indices of the models, those last whose files have to be downloaded: planning waits for them."""
    return sorted(range(len(configs)), key=lambda index: not _is_local(configs[index]))


def _is_local(config: EngineConfig) -> bool:
    if config.model.startswith(STORE_SCHEMES):
        return False
    environment = dataclasses.replace(read_environment(), hf_hub_offline=True)
    try:
        path = resolve_model(environment.apply(config), environment)
        if config.load_format != "dummy":
            weights_of(config, path).files()  # of an interrupted download some are absent
    except Exception:  # its own plan reports what is wrong
        return False
    return True


def _estimate(config: EngineConfig) -> MemoryEstimate:
    if config.kv_cache_memory_bytes is None and config.num_pages is None:
        config = config.replace(kv_cache_memory_bytes=_ALL)
    try:
        prepared = prepare(config, met=False)
    except (ValueError, OSError, MemoryError, NotImplementedError) as error:
        return MemoryEstimate(error=str(error) or type(error).__name__)
    except Exception as error:  # the other models are planned all the same
        traceback.print_exc()
        return MemoryEstimate(error=f"its memory cannot be planned ({type(error).__name__}: {error})")
    try:
        return _of_plan(prepared, prepared.memory_plan, auto=config.max_model_len == "auto")
    finally:
        prepared.ranks.close()


def _of_plan(prepared: EnginePlan, plan: MemoryPlan, auto: bool) -> MemoryEstimate:
    takes, page, facts = plan.model_memory.estimate, plan.model_memory.page_bytes, prepared.capabilities
    memory = prepared.ranks.workers[0].device.memory()
    in_host_memory = bool(facts.layout_key)
    ranks = max(1, prepared.config.tensor_parallel_size) if in_host_memory else 1
    slots = min(plan.num_slots, 3) * plan.model_memory.kv_cache_layout.slot_bytes
    least = 2 * page + slots if auto else (plan.budget_share + 1) * page + slots
    return MemoryEstimate(
        weights=takes.weights * ranks, workspace=(takes.workspace + takes.captured) * ranks,
        kv_cache=plan.kv_bytes * ranks, kv_cache_least=least * ranks, sleeps=facts.sleep,
        max_model_len=plan.max_model_len,
        in_host_memory=in_host_memory, free=memory.free, total=memory.total,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
