"""Stand-in for a model: its steps take the time that costs say, and draw a token for each request that needs one."""

import random
from collections.abc import Callable

import torch

from quintet.engine.executor.model_runner import Forward, StepResult, StepRunner
from quintet.engine.executor.output_rows import OutputRows
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.observability.spans import Spans
from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan
from quintet_tools.simulate.cost_model import Costs, Work

_NOTHING = torch.empty(0)


def _no_worker(rank: int) -> Worker:
    raise AssertionError("simulated steps have no workers")


class TimedSteps(StepRunner):
    """Steps of one engine, with a clock of its own. Times are seconds of the trace."""

    routed_experts = None  # it computes none

    def __init__(self, costs: Costs, busy: Callable[[], int], seed: int = 0) -> None:
        """`busy`: how many engines of its machine compute, this one among them. `seed`: of how steps differ."""
        self.spans, self.ranks = Spans(), WorkerGroup(0, _no_worker)
        self.now = 0.0  # set by who asks for a step; then, when its results are there
        self.worked = 0.0  # seconds of all steps
        self.scheduled: dict[str, float] = {}  # when requests that have not ended were first computed
        self._costs, self._busy, self._draw = costs, busy, random.Random(seed)
        self._free = 0.0  # when the device has done what it was given

    @property
    def supports_overlap(self) -> bool:
        return self._costs.shape.overlap

    def agree(self, plan: StepPlan, result: StepResult | Exception) -> StepResult | Exception:
        """Returns the result: it has no other ranks."""
        return result

    def forward(self, plan: StepPlan) -> Forward:
        """Starts the step behind those that run."""
        sample: list[Request] = []
        context = pairs = 0
        for request, count in plan.tokens.items():
            first = request.num_computed
            if count == 1:
                context += first + 1
            else:
                pairs += count * first + count * (count + 1) // 2
            if first + count == len(request.token_ids):
                sample.append(request)
            self.scheduled.setdefault(request.core_request.request_id, self.now)
        seconds = self._costs.seconds(Work(plan.num_tokens, plan.num_rows, context, pairs), self._busy())
        seconds *= self._draw.choice(self._costs.spread)
        self._free = max(self._free, self.now) + seconds
        self.worked += seconds
        return Forward(OutputRows(sample), _NOTHING)

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        """Draws tokens that differ between requests, so that none finds another's output in the prefix cache."""
        sample, ends = forward.rows.sample, self._free
        tokens = [(each.order * 1_000_003 + len(each.token_ids)) & 0x7FFFFFFF for each in sample]

        def wait() -> StepResult:
            self.now = max(self.now, ends)
            return StepResult(forward.rows, tokens, None, {}, {})

        return wait

    def start_over(self) -> None:
        """There is nothing to forget."""
