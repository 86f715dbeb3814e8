"""The engine at a glance."""

from dataclasses import dataclass


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
    num_drafts: int = 0  # times that tokens of a request were guessed
    num_draft_tokens: int = 0  # that were guessed
    num_accepted_tokens: int = 0  # of them, those that were drawn
    asleep: int = 0  # the level; 0: awake
