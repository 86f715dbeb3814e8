"""Logits processors that ranks and engines in processes of their own find by name."""

from collections.abc import Sequence

from torch import Tensor

from quintet import SamplingParams
from quintet.engine.sampling.logits_processors import RequestLogitsProcessor, RowFunction


class Shift(RequestLogitsProcessor):
    """Where `many` is among a request's extra_args, the likeliest token follows from it and all tokens before; 99: it
    fails after four."""

    def for_request(self, params: SamplingParams) -> RowFunction | None:
        many = (params.extra_args or {}).get("many")

        def function(prompt: Sequence[int], output: Sequence[int], logits: Tensor) -> Tensor:
            if many == 99 and len(output) == 4:
                raise ValueError("four are enough")
            logits[(sum(prompt) + sum(output) + len(output) * many) % len(logits)] += 50
            return logits

        return function if many else None
