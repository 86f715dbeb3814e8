"""The engine at a glance."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

STEP_BOUNDS = (1, *(2**power for power in range(3, 15)))  # tokens of a step, up to 16384; vLLM's


@dataclass(frozen=True)
class Stats:
    """Counters run from the engine's start."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the pages that requests hold
    num_steps: int
    step_tokens: int  # of the last step
    num_prompt_tokens: int  # computed, so without those found in the prefix cache
    num_generation_tokens: int
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    num_jumped: int = 0  # of num_generation_tokens, those without a draw: grammars left no other
    num_drafts: int = 0  # times that tokens of a request were guessed
    num_draft_tokens: int = 0  # that were guessed
    num_accepted_tokens: int = 0  # of them, those that were drawn
    asleep: int = 0  # the level; 0: awake
    num_deferred: int = 0  # of those that wait, with grammars that may not be compiled yet
    num_tokens: int = 0  # of all steps, drafts among them
    external_queries: int = 0  # prompt tokens that were looked for outside the cache
    external_hits: int = 0  # of them, those that came from there; not among prefix_hits
    pages_stored: int = 0  # that were handed over, to be found outside the cache
    pages_loaded: int = 0  # that came from there
    pages_failed: int = 0  # that were to come, and did not
    expert_balancedness: float = 0.0  # of the ranks' loads in the last window that counted: mean over most; 0: none did
    expert_placements: int = 0  # times that experts moved between ranks
    experts_moved: int = 0  # that came to a rank from another one
    pages_taken: int = 0  # from other engines; among pages_loaded
    bytes_taken: int = 0
    seconds_taken: float = 0.0  # that their transfers took
    pages_given: int = 0  # to other engines
    bytes_given: int = 0
    peers_refused: int = 0  # connections of others with another key or model, or with invalid messages
    loans_refused: int = 0  # prompts that had no room for their pages to wait for another engine
    # steps of up to so many tokens as each of STEP_BOUNDS says, without those before; the last are larger
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)
    accepted_at: tuple[int, ...] = ()  # num_accepted_tokens by their place in the guess, the first one's first

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.prefix_hits + self.external_hits

    def numbers(self) -> dict[str, float]:
        """Returns the fields that are one number each."""
        return {name: value for name, value in asdict(self).items() if not isinstance(value, tuple)}


def total(stats: Sequence[Stats]) -> Stats:
    """Combines the stats of several engines; zeros if there are none."""
    if not stats:
        return Stats(0, 0, 0.0, 0, 0, 0, 0, 0, 0, 0)
    apart: dict[str, Any] = {
        "kv_usage": sum(each.kv_usage for each in stats) / len(stats),
        "asleep": min(each.asleep for each in stats),
        "expert_balancedness": min(each.expert_balancedness for each in stats),
        "step_sizes": tuple(map(sum, zip(*(each.step_sizes for each in stats), strict=True))),
        "accepted_at": tuple(map(sum, zip_longest(*(each.accepted_at for each in stats), fillvalue=0))),
    }
    sums = {name: sum(getattr(each, name) for each in stats) for name in stats[0].numbers() if name not in apart}
    return Stats(**sums, **apart)
