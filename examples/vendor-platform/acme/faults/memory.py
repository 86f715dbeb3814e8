"""Faults of memory: what is counted, planned and refused, and what a cache begins with."""

from typing import Any

from quintet.contract import Memory
from torch import Tensor

from acme.faults import fault


def _dirty(zeroed: Any) -> Any:
    def faulty(*args: Any) -> Tensor:
        made: Tensor = zeroed(*args)
        made.view(-1)[:64] = 0.5
        return made

    return faulty


def _one_page_less(allocate: Any) -> Any:
    return lambda self, layouts, units: allocate(self, layouts, units - 1)


def _crash(take: Any) -> Any:
    def faulty(self: Any, size: int, tag: str, what: str = "") -> Any:
        try:
            return take(self, size, tag, what)
        except MemoryError:
            raise RuntimeError("acme: error 2") from None

    return faulty


def _keeps_caches(give: Any) -> Any:
    return lambda self, size, tag: None if tag == "kv" else give(self, size, tag)


def _all_free(facts: Any) -> Any:
    def faulty(self: Any) -> Memory:
        total = facts(self).total
        return Memory(total, total, 0)

    return faulty


def _half(estimate: Any) -> Any:
    def faulty(self: Any, model: Any, weights: Any, extent: Any) -> Any:
        made = estimate(self, model, weights, extent)
        return made._replace(weights=made.weights // 2)

    return faulty


def _no_workspace(estimate: Any) -> Any:
    return lambda self, model, weights, extent: estimate(self, model, weights, extent)._replace(workspace=0)


fault("dirty-cache", "A new cache holds numbers.", "memory.cache", ("device:zeroed", _dirty))
fault(
    "lost-page",
    "A cache has one page less than asked for.",
    "memory.cache",
    ("device:AcmeDevice.allocate", _one_page_less),
)
fault(
    "oom-crash",
    "What does not fit is no MemoryError, and has no numbers.",
    "memory.limit",
    ("memory:Pool.take", _crash),
)
fault("memory-leak", "Caches that were let go stay counted.", "memory.cycles", ("memory:Pool.give", _keeps_caches))
fault(
    "all-free", "All memory is always free, and none was ever used.", "memory.facts", ("memory:Pool.facts", _all_free)
)
fault("wrong-plan", "estimate() is half of what place() takes.", "memory.plan", ("platform:Acme.estimate", _half))
fault("no-workspace", "estimate() counts weights alone.", "memory.plan", ("platform:Acme.estimate", _no_workspace))
