"""The memory plan: how many pages and states fit beside the weights, and how long a request may get."""

from bisect import bisect_right
from dataclasses import dataclass

from quintet.config import EngineConfig
from quintet.engine.kv_cache.groups import KVCacheLayout
from quintet.engine.kv_cache.state_slots import SLOTS_PER_REQUEST
from quintet.interface.types import Estimate, Memory, ShapeBucket

GIB = 2**30
NUM_USUAL_WIDTHS = 2  # of page tables, the narrowest: on GPUs 64 and 256 pages, requests of up to 4,096 tokens


@dataclass(frozen=True)
class ModelMemory:
    """Memory that the model takes on one device, and the length that it was made for, in tokens."""

    estimate: Estimate
    kv_cache_layout: KVCacheLayout
    max_model_len: int
    max_step_tokens: int  # tokens of the largest step

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.kv_cache_layout.page_bytes

    def pages_for(self, tokens: int, page_size: int) -> int:
        """The most that a request of so many tokens holds."""
        return self.kv_cache_layout.max_pages(tokens, page_size, self.max_step_tokens)

    def max_tokens(self, pages: int, page_size: int) -> int:
        """Tokens of the longest request that so many pages hold, up to the length."""
        return (
            bisect_right(range(self.max_model_len + 1), pages, key=lambda tokens: self.pages_for(tokens, page_size)) - 1
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Decided sizes, with the numbers behind them. `num_pages` includes the one that padding writes to."""

    num_pages: int
    max_model_len: int
    model_memory: ModelMemory
    budget: int  # bytes for weights, workspace and cache together; 0 where the cache was sized by hand
    budget_share: int = 0  # pages of a request of max_model_len
    num_slots: int = 0  # of states, where layers keep some; the first takes the writes of padding

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.model_memory.page_bytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.model_memory.kv_cache_layout.slot_bytes

    @property
    def max_requests(self) -> int | None:
        """The most that find slots at once; None: no layer keeps a state."""
        return (self.num_slots - 1) // SLOTS_PER_REQUEST if self.num_slots else None

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of requests of max_model_len that fit at once, the last of them in part."""
        return (self.num_pages - 1) * self.max_model_len // self.budget_share if self.budget_share else 0

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Steps that the platform captures where shapes are free."""
        return self.model_memory.estimate.buckets

    @property
    def captured_ahead(self) -> tuple[ShapeBucket, ...]:
        """Those of them that `capture_ahead` captures."""
        return tuple(each for each in self.buckets if each.tokens not in self.model_memory.estimate.compiled_on_demand)

    def steps_to_capture(self, all_sizes: bool, decodes: bool) -> tuple[ShapeBucket, ...]:
        """The steps that are captured before a request comes: all, or decode steps of requests up to a usual length."""
        if all_sizes:
            return self.captured_ahead
        steps = [each for each in self.buckets if each.decode] if decodes else []
        usual = sorted({each.pages for each in steps})[:NUM_USUAL_WIDTHS]
        return tuple(each for each in steps if each.pages in usual)

    def __str__(self) -> str:
        takes = self.model_memory.estimate
        captured = f"captured steps {_gib(takes.captured)}, " if takes.captured else ""
        groups = len(self.model_memory.kv_cache_layout.groups)
        shared = f" that {groups} groups of layers share" if groups > 1 else ""
        shared += (
            f", of which {_gib(self.state_bytes)} in {self.num_slots} states of {self.max_requests} requests at once"
            if self.num_slots
            else ""
        )
        drafts = self.model_memory.kv_cache_layout.max_drafts
        shared += f", with {drafts} drafts beside each" if drafts and self.num_slots else ""
        return (
            f"weights {_gib(takes.weights)}, workspace {_gib(takes.workspace)}, {captured}"
            f"KV cache {_gib(self.kv_bytes)} in {self.num_pages} pages{shared}, max_model_len {self.max_model_len}"
            + (
                f": {(self.num_pages - 1) / self.budget_share:.1f} requests of that length fit at once"
                if self.budget_share
                else ""
            )
        )


def plan_memory(config: EngineConfig, footprint: ModelMemory, memory: Memory) -> MemoryPlan:
    """Pages from num_pages, kv_cache_memory_bytes or the rest of the budget; ValueError with the numbers if too few."""
    budget, takes, page = 0, footprint.estimate, max(1, footprint.page_bytes)
    room: int | None = None  # bytes for the cache; None: pages were counted
    if config.kv_cache_memory_bytes is not None:
        room = config.kv_cache_memory_bytes
    elif config.num_pages is None:
        budget = min(int(memory.total * config.gpu_memory_utilization), memory.free)
        room = budget - takes.weights - takes.workspace - takes.captured
    wanted = footprint.max_model_len if config.max_model_len is None else config.max_model_len
    need = 0 if wanted == "auto" else (footprint.pages_for(int(wanted), config.page_size) + 1) * footprint.page_bytes
    slots = _num_slots(config, footprint, room, need)
    pages = (config.num_pages or 0) if room is None else (room - slots * footprint.kv_cache_layout.slot_bytes) // page
    pages = pages if footprint.page_bytes else max(2, pages)  # of no bytes
    fits = footprint.max_tokens(max(0, pages - 1), config.page_size)
    length = fits if wanted == "auto" else int(wanted)
    each = footprint.pages_for(length, config.page_size)
    if length < 1 or pages < each + 1:
        raise ValueError(_does_not_fit_error(config, footprint, budget, max(each + 1, 2), max(0, pages)))
    useful = config.max_num_seqs * each + 1  # more would never be held at once
    if config.num_pages is None:
        need = each + 1
        pages = max(need, min(pages, max(useful, 2 * need) if config.enable_prefix_caching else useful))
    return MemoryPlan(max(2, int(pages)), length, footprint, budget, each, slots)


def _num_slots(config: EngineConfig, footprint: ModelMemory, room: int | None, need: int) -> int:
    """Slots for the states of max_num_seqs requests, and as many to be found again; where that is more than half of the
    room, all of it without pages, or more than is left beside the `need` bytes of one request's pages, as many as that
    holds. ValueError if one request's do not fit."""
    arrangement = footprint.kv_cache_layout
    if not arrangement.has_states:
        return 0
    wanted = 1 + config.max_num_seqs * (SLOTS_PER_REQUEST + config.enable_prefix_caching)
    if room is None or not arrangement.slot_bytes:
        return wanted
    share = min(
        room // (2 if arrangement.groups else 1), max(room - need, (1 + SLOTS_PER_REQUEST) * arrangement.slot_bytes)
    )
    slots = min(wanted, share // arrangement.slot_bytes)
    if slots < 1 + SLOTS_PER_REQUEST:
        half = "half of " if arrangement.groups else ""
        raise ValueError(
            f"the state of one request needs {1 + SLOTS_PER_REQUEST} slots of {arrangement.slot_bytes / 2**20:.2f} "
            "MiB, "
            f"{max(0, slots)} fit into {half}the {_gib(room)} for the cache; raise kv_cache_memory_bytes or "
            "gpu_memory_utilization"
        )
    return slots


def _does_not_fit_error(config: EngineConfig, footprint: ModelMemory, budget: int, need: int, fit: int) -> str:
    takes = footprint.estimate
    given = (
        f"num_pages={config.num_pages}"
        if config.num_pages is not None
        else (
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
            if config.kv_cache_memory_bytes is not None
            else f"{_gib(takes.weights)} of {_gib(budget)} hold weights and "
            f"{_gib(takes.workspace + takes.captured)} activations"
        )
    )
    room = footprint.max_tokens(max(0, fit - 1), config.page_size)
    knob = f"lower max_model_len to {room} or less (or 'auto')" if room else "choose a smaller model"
    more = "raise gpu_memory_utilization" if budget else "raise it"
    return (
        f"KV cache needs {need} pages of {footprint.page_bytes / 2**20:.2f} MiB for one request of max_model_len, "
        f"{fit} fit: {given}; {knob}, or {more}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
