"""Shared parts of the offline benchmarks: flags, random prompts, and figures."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.common.value_parsers import count, optional, text
from quintet.config import option
from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quintet import LLM, RequestOutput


def setting(default: Any, help: str, minimum: int = 1) -> Any:
    """A whole number among a benchmark's flags."""
    return option(default, count(minimum), help, group="load")


def output_file() -> Any:
    """The flag for where the figures go."""
    return option(None, optional(text), "write the figures to this file too", group="load", metavar="FILE")


class Prompts:
    """Random token ids from a seed. No two prompts begin alike, so that the prefix cache answers none."""

    def __init__(self, llm: "LLM", seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab = len(llm.get_tokenizer())

    def draw(self, num_prompts: int, length: int) -> list[dict[str, list[int]]]:
        """Prompts for LLM.generate."""
        return [
            {"prompt_token_ids": [self._random.randrange(self._vocab) for _ in range(length)]}
            for _ in range(num_prompts)
        ]


def exact_length_params(num_tokens: int) -> SamplingParams:
    """Returns sampling parameters for exactly `num_tokens` output tokens."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def times_to_first_token(outputs: "Sequence[RequestOutput]") -> list[float]:
    """Seconds from each request's arrival to its first token."""
    times = [output.metrics.time_to_first_token for output in outputs]
    return [each for each in times if each is not None]


def report(figures: Mapping[str, Any], file: str | None) -> None:
    """One figure per line; to the file as JSON."""
    if file:
        Path(file).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for name, value in figures.items():
        if isinstance(value, Mapping):
            value = "  ".join(f"{key} {each:.4g}" for key, each in value.items())
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:26} {shown}")
