"""Tokens per second of streamed outputs."""

import time
from collections.abc import Generator, Iterable

from quintet.outputs import RequestOutput


class TokenSpeed:
    """Counts the tokens of streamed outputs and what they took, from the first request to the last token."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first: float | None = None  # when the first token came
        self.last = self.started
        self.num_prompt = self.num_output = self.num_first = 0

    def watch(self, outputs: Iterable[RequestOutput]) -> Generator[RequestOutput, None, None]:
        """Passes deltas on and counts them. Closing this closes what it watches, which ends the requests."""
        seen: set[str] = set()
        try:
            for output in outputs:
                self._count(output, output.request_id not in seen)
                seen.add(output.request_id)
                yield output
        finally:
            close = getattr(outputs, "close", None)
            if close:
                close()

    def _count(self, output: RequestOutput, new: bool) -> None:
        self.last = time.perf_counter()
        if new:
            self.num_prompt += len(output.prompt_token_ids or ())
        self.num_output += sum(len(each.token_ids) for each in output.outputs)
        if self.first is None and self.num_output:
            self.first, self.num_first = self.last, self.num_output

    def __str__(self) -> str:
        first = (self.first or self.last) - self.started
        rest = self.last - (self.first or self.last)
        later = self.num_output - self.num_first
        rate = f", {later / rest:.1f} tokens/s" if rest > 0 and later else ""
        prompt = f"{self.num_prompt} prompt tokens, first token after {first:.3f} s"
        return f"{prompt}; {self.num_output} tokens of output{rate}"
