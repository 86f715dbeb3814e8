"""What the offline benchmarks share: their flags, random prompts, and figures."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config import option
from quintet.sampling_params import SamplingParams
from quintet.values import count, optional, text

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


def exactly(num_tokens: int) -> SamplingParams:
    """So many tokens of output, whatever the model says."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def percentiles(values: Sequence[float], shares: Sequence[int] = (10, 50, 90, 99)) -> dict[str, float]:
    """Mean and nearest-rank percentiles."""
    ranked = sorted(values)
    at = {f"p{share}": ranked[max(0, -(-share * len(ranked) // 100) - 1)] for share in shares}
    return {"mean": sum(ranked) / len(ranked), **at}


def first_tokens(outputs: "Sequence[RequestOutput]") -> list[float]:
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
