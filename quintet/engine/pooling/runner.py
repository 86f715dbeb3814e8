"""Runs a planned step on the workers, and brings the hidden states that it gave to the host, text by text."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.model_runner import Agree, Forward, StepResult, StepRunner
from quintet.engine.executor.output_rows import OutputRows
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.observability.spans import Spans
from quintet.engine.pooling.adapted_heads import AdaptedHeads, adapt_heads
from quintet.engine.pooling.heads import FloatRows
from quintet.engine.pooling.late_interaction import QueryCache
from quintet.engine.pooling.pooler import PooledRows, Pooler
from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan


class PoolingRunner(StepRunner):
    """Runs the model of a scheduler's plan, and pools. What is behind the trunk is computed on the host."""

    def __init__(
        self,
        ranks: WorkerGroup,
        batches: BatchBuilder,
        pooler: Pooler,
        spans: Spans | None = None,
        agreement: Agree | None = None,
    ) -> None:
        super().__init__(ranks, batches, spans, agreement)
        self.pooler = pooler
        self._queries = QueryCache()

    @property
    def supports_overlap(self) -> bool:
        return True  # no step needs the results of the one before it

    def adapted_heads(self, saved: Mapping[str, Tensor]) -> AdaptedHeads:
        """Returns the pooler's heads with an adapter's tensors."""
        return adapt_heads(self.pooler.heads, saved)

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Runs an empty step of each size, to compile them now."""
        shown = progress and bool(self._fixed)
        for bucket in tqdm(self._fixed, desc="Warming up", unit="size", disable=not shown, leave=False):
            self._device.to_host(self._hidden(self._ranks.run(bucket.batch)))()

    def forward(self, plan: StepPlan) -> Forward:
        """Starts the model."""
        host, rows = self._built(plan)
        given = self._hidden(self._ranks.run(host))
        if self.spans.events is not None:
            self.spans.lap("start", plan)
        return Forward(rows, given)

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        """Starts the copy of what comes out; calling the result waits for it."""
        rows, copied = forward.rows, self._device.to_host(forward.outputs)

        def wait() -> StepResult:
            return StepResult(OutputRows([]), [], None, {}, forward.failed, self._pool_rows(rows, copied()))

        return wait

    def _pool_rows(self, rows: OutputRows, given: Tensor) -> dict[Request, FloatRows | str]:
        """The numbers of each text that is whole now, or why there are none."""
        hidden: FloatRows = given.float().numpy()
        found: dict[Request, FloatRows | str] = {}
        at = 0
        for request, first, count, last in rows.pool:
            params = request.core_request.pooling
            assert params is not None, "a request of another runner"
            gathered = request.pooled_rows = request.pooled_rows or PooledRows()
            if count:
                gathered.add(hidden[at : at + count], first, self.pooler.pooling_type(params))
            at += count
            if last:
                request.pooled_rows = None
                try:
                    heads = None if request.lora is None else request.lora.packed.heads
                    numbers = self.pooler.finish(gathered, params, request.token_ids, heads)
                    if params.late_interaction_params is not None:
                        numbers = self._queries.apply(params.late_interaction_params, numbers)
                    found[request] = numbers
                except ValueError as error:
                    found[request] = str(error)
        return found

    @staticmethod
    def _hidden(outputs: object) -> Tensor:
        hidden: Tensor | None = getattr(outputs, "hidden_states", None)
        assert hidden is not None, "a model that gives no hidden states has no numbers"
        return hidden
