"""Chooses the data-parallel engine of a request: one that has its prefix cached, unless it is busier than others."""

from collections.abc import Sequence
from typing import NamedTuple

from quintet.engine.data_parallel.prefix_affinity import PrefixIndex
from quintet.engine.observability.stats import Stats

# requests that an engine may have more than the one with the fewest, and still get a prefix that it has
MAX_EXTRA_REQUESTS = 2
MAX_KNOWN_PAGES = 1 << 16  # pages of prompts that are remembered of each engine
MAX_COMPARED_PAGES = 1024  # pages of a prompt that are compared: what prompts share is at their start


class _OpenRequest(NamedTuple):
    """Engine and weight of a request that has not ended."""

    engine: int
    weight: int  # completions


class LoadBalancer:
    """Router of requests: knows which engine has each request, and the load that engines report from other senders."""

    def __init__(self, count: int, page_size: int) -> None:
        self._page_size = page_size
        self._open: dict[str, _OpenRequest] = {}
        self._own, self._others = [0] * count, [0] * count  # requests that have not ended
        self._pages = [PrefixIndex(MAX_KNOWN_PAGES) for _ in range(count)]
        self._next = 0  # the first choice among equal engines

    def choose(
        self, request_id: str, prompt_ids: Sequence[int], salt: bytes = b"", weight: int = 1, hung: Sequence[int] = ()
    ) -> int:
        """Returns the engine for a request, which is open from now on. `weight`: completions; `salt`: what keeps
        prompts of the same tokens apart; `hung`: engines that get a request only if all are."""
        chain, loads = self._chain(prompt_ids, salt), self.loads
        count = len(loads)
        living = [each for each in range(count) if each not in hung] or range(count)
        least = min(loads[each] for each in living)
        near = [each for each in living if loads[each] <= least + MAX_EXTRA_REQUESTS]
        best = max(
            near,
            key=lambda each: (self._pages[each].shared_length(chain), -loads[each], -((each - self._next) % count)),
        )
        self._next = (best + 1) % count
        self._open[request_id] = _OpenRequest(best, weight)
        self._own[best] += weight
        self._pages[best].add(chain)
        return best

    def engine_of(self, request_id: str) -> int | None:
        """Returns the engine of an open request; None if it is not open."""
        found = self._open.get(request_id)
        return None if found is None else found.engine

    def close(self, request_id: str) -> int | None:
        """Ends a request -> its engine; None if it was closed before."""
        found = self._open.pop(request_id, None)
        if found is None:
            return None
        self._own[found.engine] -= found.weight
        return found.engine

    def update_load(self, engine: int, stats: Stats) -> None:
        """Updates the load that an engine has from other senders."""
        queues = stats.scheduler
        self._others[engine] = max(0, queues.num_running + queues.num_waiting - self._own[engine])

    def clear_prefixes(self) -> None:
        """Clears the known prefixes, after the engines' prefix caches were emptied."""
        for pages in self._pages:
            pages.clear()

    @property
    def loads(self) -> list[int]:
        """Returns the number of requests of each engine that have not ended."""
        return [own + others for own, others in zip(self._own, self._others, strict=True)]

    def _chain(self, prompt_ids: Sequence[int], salt: bytes) -> list[int]:
        """Returns a number for each full page, which depends on its tokens and those before it. A wrong guess only
        costs time."""
        size, chain, last = self._page_size, list[int](), hash(salt)
        for start in range(0, min(len(prompt_ids), size * MAX_COMPARED_PAGES) - size + 1, size):
            last = hash((last, *prompt_ids[start : start + size]))
            chain.append(last)
        return chain
