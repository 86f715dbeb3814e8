"""How requests share the steps."""

from dataclasses import dataclass

from quintet.settings.option import choice, option
from quintet.values import count, truth


@dataclass(frozen=True)
class SchedulingOptions:
    """Who gets how much of a step."""

    max_num_seqs: int = option(256, count(), "most requests in one step", group="scheduling")
    max_num_batched_tokens: int = option(2048, count(), "most tokens in one step", group="scheduling")
    enable_chunked_prefill: bool = option(True, truth, "let a long prompt take several steps", group="scheduling")
    scheduling_policy: str = choice(
        "fcfs", "fcfs", "priority", help="who goes first: first come, or the lowest priority number", group="scheduling"
    )
