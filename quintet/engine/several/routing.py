"""Which of several engines takes a request: one that knows its beginning, unless that has more to do than others."""

from collections.abc import Sequence
from typing import NamedTuple

from quintet.engine.several.beginnings import Beginnings
from quintet.engine.stats import Stats

AHEAD = 2  # requests that an engine may have more than the one with the fewest, and still be given what it knows
KEPT = 1 << 16  # pages of prompts that are remembered of each engine
MOST_PAGES = 1024  # of a prompt that are looked at: what is alike is so from the start


class _Open(NamedTuple):
    """Where a request is."""

    engine: int
    weight: int  # completions


class Router:
    """Knows what it has sent where, and what the engines tell of the others who send to them."""

    def __init__(self, count: int, page_size: int) -> None:
        self._page_size = page_size
        self._open: dict[str, _Open] = {}
        self._own, self._others = [0] * count, [0] * count  # requests that have not ended
        self._pages = [Beginnings(KEPT) for _ in range(count)]
        self._next = 0  # of engines that are alike, the first that is asked

    def choose(self, request_id: str, prompt_ids: Sequence[int], salt: bytes = b"", weight: int = 1) -> int:
        """The engine for a request, which is open from now on. `weight`: completions; `salt`: what keeps prompts of the
        same tokens apart."""
        chain, loads = self._chain(prompt_ids, salt), self.loads
        count, least = len(loads), min(loads)
        near = [each for each in range(count) if loads[each] <= least + AHEAD]
        best = max(
            near, key=lambda each: (self._pages[each].shared(chain), -loads[each], -((each - self._next) % count))
        )
        self._next = (best + 1) % count
        self._open[request_id] = _Open(best, weight)
        self._own[best] += weight
        self._pages[best].remember(chain)
        return best

    def engine_of(self, request_id: str) -> int | None:
        """Where an open request is."""
        found = self._open.get(request_id)
        return None if found is None else found.engine

    def close(self, request_id: str) -> int | None:
        """The request has ended -> where it was; None if it was closed before."""
        found = self._open.pop(request_id, None)
        if found is None:
            return None
        self._own[found.engine] -= found.weight
        return found.engine

    def hear(self, engine: int, stats: Stats) -> None:
        """What an engine has to do besides what it has from here."""
        self._others[engine] = max(0, stats.num_running + stats.num_waiting - self._own[engine])

    def forget(self) -> None:
        """The engines' prefix caches were emptied."""
        for pages in self._pages:
            pages.clear()

    @property
    def loads(self) -> list[int]:
        """Requests of each engine that have not ended."""
        return [own + others for own, others in zip(self._own, self._others, strict=True)]

    def _chain(self, prompt_ids: Sequence[int], salt: bytes) -> list[int]:
        """A number for each whole page that says what stands in it and before it. A wrong guess costs time alone."""
        size, chain, last = self._page_size, list[int](), hash(salt)
        for start in range(0, min(len(prompt_ids), size * MOST_PAGES) - size + 1, size):
            last = hash((last, *prompt_ids[start : start + size]))
            chain.append(last)
        return chain
