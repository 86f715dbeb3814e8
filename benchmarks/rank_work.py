"""The work that ways of sharing a model out are measured with: quintet's and vLLM's LLM take it alike."""

import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """Prompts of so many tokens, answered by so many."""

    requests: int
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """Tokens of all outputs; of all prompts if the output is one token."""
        return self.requests * (self.output if self.output > 1 else self.prompt)

    def seconds(self, llm: Any, params: Any) -> float:
        """Returns the seconds that `llm` takes. `params`: its SamplingParams class."""
        greedy = params(temperature=0, max_tokens=self.output, ignore_eos=True, detokenize=False)
        prompts = [
            {"prompt_token_ids": [(7 * i + at) % 1000 for at in range(self.prompt)]} for i in range(self.requests)
        ]
        start = time.perf_counter()
        llm.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - start


WORK = {
    "one request": Work(1, 16, 64),
    "a prompt of 512 tokens": Work(1, 512, 1),
    "16 requests": Work(16, 64, 32),
}
