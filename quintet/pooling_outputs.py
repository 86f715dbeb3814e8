"""Outputs of pooling models: vLLM's classes, with NumPy arrays of float32 in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quintet.outputs import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.float32]]

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """The numbers of a text: [n], or [tokens, n] where each token has its own."""

    data: "Numbers"  # float32, read-only


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    data: "Numbers"  # [hidden] float32, read-only

    @property
    def embedding(self) -> list[float]:
        """The same as a list."""
        listed: list[float] = self.data.tolist()
        return listed

    @property
    def hidden_size(self) -> int:
        return len(self.data)


@dataclass(slots=True)
class ClassificationOutput:
    """A text's classes: probabilities, or logits where no activation was wanted."""

    data: "Numbers"  # [classes] float32, read-only

    @property
    def probs(self) -> list[float]:
        """The same as a list."""
        listed: list[float] = self.data.tolist()
        return listed

    @property
    def num_classes(self) -> int:
        return len(self.data)


@dataclass(slots=True)
class ScoringOutput:
    """Score of two texts: a higher one means a better match."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    """One text's answer. What failed says why in `error`, and then there are no numbers."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt: str | None = None  # None if it was given as token ids
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


class Unanswered(RuntimeError):
    """A text has no numbers: the step failed, or its numbers are not finite; the message says which and why."""


def answered(output: RequestOutput, make: Callable[["Numbers"], T]) -> PoolingRequestOutput[T]:
    """Returns the output of a pooling request. Raises Unanswered, with the reason, if it has no numbers."""
    if output.pooled is None:
        why = next((each.error for each in output.outputs if each.error), None) or "it was taken back"
        raise Unanswered(f"request {output.request_id}: {why}")
    return PoolingRequestOutput(
        output.request_id, make(output.pooled), output.prompt_token_ids, True, output.num_cached_tokens, output.prompt,
        None, output.metrics,
    )  # fmt: skip


def scored(request_id: str, score: float, token_ids: Sequence[int], cached: int = 0) -> ScoringRequestOutput:
    """A score that was made of other answers."""
    return PoolingRequestOutput(request_id, ScoringOutput(score), list(token_ids), True, cached)
