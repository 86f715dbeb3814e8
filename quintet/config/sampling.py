"""Sampling options of the engine: seed, logprobs, logits processors; the rest belongs to each request."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import count, integer, list_of, text
from quintet.config.schema.fields import choice_field, option


def _processor(value: Any) -> Any:
    """A class, or the dotted name of one."""
    return value if isinstance(value, type) else text(value)


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling settings of all requests."""

    seed: int = option(0, integer, "of the random numbers of requests that bring no seed", group="sampling")
    max_logprobs: int = option(
        20, count(0, -1), "most logprobs that a request may ask for; -1: the whole vocabulary", group="sampling"
    )
    logprobs_mode: str = choice_field(
        "raw_logprobs", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits",
        help="what logprobs are: of the model's own scores, or after penalties, temperature and cuts", group="sampling",
    )  # fmt: skip
    logits_processors: tuple[Any, ...] = option(
        (), list_of(_processor), "classes that edit logits, by dotted name or entry point", group="sampling"
    )
