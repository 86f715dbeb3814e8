"""The memory plan: how many pages fit beside the weights, and how long a request may get."""

from dataclasses import dataclass

from quintet.config import EngineConfig
from quintet.types import Memory

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """What the model takes on one device, in bytes, and the length that it was made for, in tokens."""

    weights: int
    page: int  # one page over all layers
    workspace: int  # activations of the largest step
    length: int
    captured: int = 0  # steps that a platform captures


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided, with the numbers behind it. `num_pages` includes the one that padding writes to."""

    num_pages: int
    max_model_len: int
    sizes: Sizes
    budget: int  # bytes for weights, workspace and cache together; 0 where the cache was sized by hand

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.sizes.page

    def __str__(self) -> str:
        captured = f"captured steps {_gib(self.sizes.captured)}, " if self.sizes.captured else ""
        return (
            f"weights {_gib(self.sizes.weights)}, workspace {_gib(self.sizes.workspace)}, {captured}"
            f"KV cache {_gib(self.kv_bytes)} in {self.num_pages} pages, max_model_len {self.max_model_len}"
        )


def plan_memory(config: EngineConfig, sizes: Sizes, memory: Memory) -> MemoryPlan:
    """Pages from num_pages, kv_cache_memory_bytes or the rest of the budget; ValueError with the numbers if too few."""
    budget = 0
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // sizes.page
    else:
        budget = min(int(memory.total * config.gpu_memory_utilization), memory.free)
        pages = (budget - sizes.weights - sizes.workspace - sizes.captured) // sizes.page
    wanted = sizes.length if config.max_model_len is None else config.max_model_len
    fits = max(0, pages - 1) * config.page_size
    length = min(sizes.length, fits) if wanted == "auto" else int(wanted)
    need = -(-length // config.page_size) + 1
    if length < 1 or pages < need:
        raise ValueError(_does_not_fit(config, sizes, budget, max(need, 2), max(0, pages)))
    useful = config.max_num_seqs * -(-length // config.page_size) + 1  # more would never be held at once
    if config.num_pages is None:
        pages = max(need, min(pages, max(useful, 2 * need) if config.enable_prefix_caching else useful))
    return MemoryPlan(int(pages), length, sizes, budget)


def _does_not_fit(config: EngineConfig, sizes: Sizes, budget: int, need: int, fit: int) -> str:
    given = (
        f"num_pages={config.num_pages}"
        if config.num_pages is not None
        else (
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
            if config.kv_cache_memory_bytes is not None
            else f"{_gib(sizes.weights)} of {_gib(budget)} hold weights and "
            f"{_gib(sizes.workspace + sizes.captured)} activations"
        )
    )
    room = max(0, fit - 1) * config.page_size
    knob = f"lower max_model_len to {room} or less (or 'auto')" if room else "choose a smaller model"
    more = "raise gpu_memory_utilization" if budget else "raise it"
    return (
        f"KV cache needs {need} pages of {sizes.page / 2**20:.2f} MiB for one request of max_model_len, "
        f"{fit} fit: {given}; {knob}, or {more}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
