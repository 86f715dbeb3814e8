"""Runner of models with audio: requests may ask for the attention of their tokens to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.engine.encoder.alignment import Aligner
from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.model_runner import Agree, Forward, ModelRunner, StepResult
from quintet.engine.observability.spans import Spans
from quintet.engine.request import Request
from quintet.engine.sampling.sampler import Sampler
from quintet.engine.step_plan import StepPlan

if TYPE_CHECKING:
    from quintet.engine.pooling.heads import FloatRows


@dataclass
class AlignedForward(Forward):
    """A step with a started model that computes the last tokens of alignments."""

    aligned: "Mapping[Request, FloatRows] | None" = None


class SpeechModelRunner(ModelRunner):
    """A ModelRunner whose steps give alignments, too."""

    def __init__(
        self, aligner: Aligner, sampler: Sampler, batches: BatchBuilder, overlap: bool = False,
        spans: Spans | None = None, agreement: Agree | None = None,
    ) -> None:  # fmt: skip
        super().__init__(aligner.ranks, sampler, batches, overlap, spans, agreement)
        self._aligner = aligner

    def forward(self, plan: StepPlan) -> Forward:
        """Starts the model."""
        with self._aligner.watching(plan):
            forward = super().forward(plan)
        aligned = self._aligner.results(plan)
        return AlignedForward(forward.rows, forward.outputs, forward.failed, aligned) if aligned else forward

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        """Samples; calling the result waits for tokens and alignments."""
        wait, aligned = super().sample(forward), getattr(forward, "aligned", None)
        if not aligned:
            return wait

        def both() -> StepResult:
            result = wait()
            return result._replace(pooled={**result.pooled, **aligned})

        return both
