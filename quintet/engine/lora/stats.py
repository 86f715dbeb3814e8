"""Statistics of the adapters of requests."""

from collections.abc import Iterable

from quintet.engine.observability.stats import MAX_LORA_NAMES, LoRAStats
from quintet.engine.request import Request


def lora_stats(running: Iterable[Request], waiting: Iterable[Request]) -> LoRAStats:
    """Returns the names of their adapters. Called from other threads, too: lists are copied before they are read."""
    return LoRAStats(*(_adapter_names(list(each)) for each in (running, waiting)))


def _adapter_names(requests: Iterable[Request]) -> tuple[str, ...]:
    """Returns the names of the adapters of requests."""
    adapters = (request.core_request.lora for request in requests)
    return tuple(sorted({each.name for each in adapters if each is not None})[:MAX_LORA_NAMES])
