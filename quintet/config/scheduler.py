"""Options of the scheduler."""

from dataclasses import dataclass

from quintet.common.value_parsers import boolean, count, optional
from quintet.config.schema.fields import choice_field, option

STEP_TOKENS = 2048
HOST_STEP_TOKENS = 512  # a step's results lie beside the weights, and streams wait for a prompt's step


@dataclass(frozen=True)
class SchedulingOptions:
    """Limits on requests and tokens in a step."""

    max_num_seqs: int = option(256, count(), "most requests in one step", group="scheduling")
    max_num_batched_tokens: int | None = option(
        None, optional(count()), f"most tokens in one step; {STEP_TOKENS}, if not given, and {HOST_STEP_TOKENS} where "
        "a model that makes text has its weights in the host's memory",
        group="scheduling",
    )  # fmt: skip
    enable_chunked_prefill: bool = option(True, boolean, "let a long prompt take several steps", group="scheduling")
    long_prefill_token_threshold: int = option(
        0, count(0), "a prompt with more tokens is long, and a step computes no more of it than that, so that others "
        "find room beside it; 0: none is", group="scheduling", metavar="TOKENS",
    )  # fmt: skip
    max_num_partial_prefills: int | None = option(
        None, optional(count()), "most prompts that are partly computed at once; more than 1 also makes prompts long "
        "that have over 4% of max_model_len, if no threshold is given; as many as there is room for, if not given",
        group="scheduling", metavar="REQUESTS",
    )  # fmt: skip
    max_long_partial_prefills: int | None = option(
        None, optional(count()), "how many of those may be long: shorter ones then go before other long ones; 1 if "
        "max_num_partial_prefills is more than 1, else any number", group="scheduling", metavar="REQUESTS",
    )  # fmt: skip
    prefill_tokens_beside_decode: int | None = option(
        None, optional(count(0)), "most prompt tokens of a step in which at least as many requests decode as wait for "
        "their prompts, so that a stream does not stop for a prompt (twice the requests that decode, if those are "
        "more), which comes later itself; no limit, if not given, or 0",
        group="scheduling", metavar="TOKENS",
    )  # fmt: skip
    stream_interval: int = option(
        1, count(), "tokens from one output of a stream to the next; the first comes at once", group="scheduling",
        metavar="TOKENS",
    )  # fmt: skip
    scheduling_policy: str = choice_field(
        "fcfs", "fcfs", "priority", help="who goes first: first come, or the lowest priority number", group="scheduling"
    )

    @property
    def step_tokens(self) -> int:
        """Most tokens in one step."""
        return self.max_num_batched_tokens or STEP_TOKENS

    def _check(self) -> None:
        partial, long = self.max_num_partial_prefills, self.max_long_partial_prefills
        for name in (
            "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills",
            "prefill_tokens_beside_decode",
        ):  # fmt: skip
            if getattr(self, name) and not self.enable_chunked_prefill:
                raise ValueError(
                    f"{name} says how prompts are cut, and enable_chunked_prefill=False cuts none; leave it out"
                )
        if long is not None and partial is not None and long > partial:
            raise ValueError(
                f"max_long_partial_prefills={long} is more than max_num_partial_prefills={partial}, of which they are "
                "some; lower it"
            )
        if long is not None and not self.long_prefill_token_threshold and (partial or 1) == 1:
            raise ValueError("max_long_partial_prefills means nothing without long_prefill_token_threshold; give both")
