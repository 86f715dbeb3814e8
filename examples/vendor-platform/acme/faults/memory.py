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
    def faulty(self: Any, model: Any, weights: Any, max_shape: Any) -> Any:
        made = estimate(self, model, weights, max_shape)
        return made._replace(weights=made.weights // 2)

    return faulty


def _no_workspace(estimate: Any) -> Any:
    return lambda self, model, weights, max_shape: estimate(self, model, weights, max_shape)._replace(workspace=0)


def _kept_when_refused(take: Any) -> Any:
    def faulty(self: Any, size: int, tag: str, what: str = "") -> Any:
        try:
            return take(self, size, tag, what)
        except MemoryError:
            self.used[tag] += size
            raise

    return faulty


def _peak_of_now(facts: Any) -> Any:
    def faulty(self: Any) -> Memory:
        made = facts(self)
        return Memory(made.free, made.total, made.total - made.free)

    return faulty


def _in_place(place: Any) -> Any:
    """The checkpoint's tensors are prepared where they lie."""

    def faulty(self: Any, weight: Any, parts: Any, into: Any = None) -> Any:
        made = place(self, weight, parts, into)
        for each in parts.values():
            if each.is_floating_point():
                each.mul_(0.5)
        return made

    return faulty


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
fault(
    "refused-and-kept",
    "What was refused for want of memory stays counted.",
    "memory.limit",
    ("memory:Pool.take", _kept_when_refused),
)
fault("no-peak", "The most that was used is what is used now.", "memory.facts", ("memory:Pool.facts", _peak_of_now))
fault(
    "writes-checkpoint",
    "place() scales the checkpoint's own tensors.",
    "ops.placed",
    ("platform:Acme.place", _in_place),
)
fault(
    "replace-ignored",
    "Weights that are to be replaced stay.",
    "models.replaced",
    ("device:AcmeDevice.overwrite", lambda overwrite: lambda self, there, x, rows=None: None),
)

fault(
    "first-rows", "Rows that are written are always the first.", "adapters.rows",
    ("device:AcmeDevice.overwrite", lambda overwrite: lambda self, there, x, rows=None: overwrite(
        self, there, x, None if rows is None else (0, rows[1])
    )),
)  # fmt: skip
