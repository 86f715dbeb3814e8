"""Commands to a worker, and its timings. Standard library alone: a peer's environment holds the peer and no more."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MAX_LEN = 2304  # tokens of the longest request: 2,048 of prompt, the rest for what follows
MAX_TOKENS = 4096  # of all requests of one run together
SEQUENCES = 16  # requests of the largest run
FILE = "file"  # variant of a checkpoint that is a GGUF file, which each engine reads as it is

Emit = Callable[[int, int], None]  # (request, token), called as soon as the engine's user could see the token


@dataclass(frozen=True)
class Job:
    """One engine with one format of the weights."""

    engine: str  # a key of ENGINES in worker.py
    bits: str  # what it is compared within: "bf16", "int8" or "int4"
    variant: str  # the engine's own name of the format
    checkpoint: str  # folder of the bfloat16 checkpoint, or a GGUF file
    work: str  # folder of what was converted from it
    threads: int

    def converted(self, suffix: str = "") -> Path:
        """Returns the path of the checkpoint in this engine's format."""
        if self.variant == FILE:
            return Path(self.checkpoint)
        return Path(self.work) / f"{Path(self.checkpoint).name}-{self.engine}-{self.variant}{suffix}"


class Engine(Protocol):
    """A model that is loaded and waits."""

    facts: Mapping[str, Any]  # `versions`, `settings`, `weight_bytes` (read for a token), `kv_element_bytes`

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        """Greedy, `tokens` for each prompt whatever they are; prompts of one call have the same length."""
        ...


class Watch:
    """Times a run from its making on; the engine reports each token to it."""

    def __init__(self, requests: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(requests)]
        self._missing = requests  # have no token yet
        self._before = 0  # tokens until the last request had its first
        self._first = self._last = self._start = time.perf_counter()

    def __call__(self, request: int, token: int) -> None:
        self._last = time.perf_counter()
        self._tokens[request].append(token)
        if len(self._tokens[request]) == 1:
            self._missing -= 1
        if self._missing == 0 and self._before == 0:
            self._first, self._before = self._last, sum(map(len, self._tokens))

    def report(self, tokens: int) -> dict[str, Any]:
        """Seconds until every request had its first token, and what came after; ValueError if any token is missing."""
        counts = sorted({len(each) for each in self._tokens})
        if counts != [tokens]:
            raise ValueError(f"each request was to give {tokens} tokens, they gave {counts}")
        return {
            "first_s": self._first - self._start,
            "later_s": self._last - self._first,
            "later_tokens": sum(map(len, self._tokens)) - self._before,
            "tokens": self._tokens[0],
        }
