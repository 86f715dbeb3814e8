"""What the engine settles about draws and their probabilities; the rest is each request's."""

from dataclasses import dataclass
from typing import Any

from quintet.settings.option import choice, option
from quintet.values import count, integer, several, text


def _processor(value: Any) -> Any:
    """A class, or the dotted name of one."""
    return value if isinstance(value, type) else text(value)


@dataclass(frozen=True)
class SamplingOptions:
    """What holds for the draws of every request."""

    seed: int = option(0, integer, "of the random numbers of requests that bring no seed", group="sampling")
    max_logprobs: int = option(
        20, count(0, -1), "most logprobs that a request may ask for; -1: the whole vocabulary", group="sampling"
    )
    logprobs_mode: str = choice(
        "raw_logprobs", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits",
        help="what logprobs are: of the model's own scores, or after penalties, temperature and cuts", group="sampling",
    )  # fmt: skip
    logits_processors: tuple[Any, ...] = option(
        (), several(_processor), "classes that edit logits, by dotted name or entry point", group="sampling"
    )
