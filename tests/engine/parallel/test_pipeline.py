"""How a pipeline's step ends, by the reports of all its ranks."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.engine.executor.model_runner import Forward, StepResult, StepRunner
from quintet.engine.executor.output_rows import OutputRows
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.observability.spans import Spans
from quintet.engine.parallel.pipeline import PipelineRunner, encode_result
from quintet.engine.parallel.setup import check_stages
from quintet.engine.parallel.step_agreement import RankFailed
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import Capabilities, DeviceLost
from quintet.interface.stage_channel import StageChannel


class Pipe(StageChannel):
    """Stage 0 of `stages` with one rank each, of which the test gives the others' reports."""

    def __init__(self, stages: int, others: Callable[[bytes], list[bytes]], result: bytes = b"") -> None:
        self.stage, self.stages, self._others, self._result = 0, stages, others, result
        self._report = b""

    def begin(self) -> None:
        pass

    def receive(self) -> Tensor:
        raise NotImplementedError

    def send(self, tensors: Sequence[Tensor] | None) -> None:
        pass

    def report(self, message: bytes, result: bytes = b"") -> None:
        self._report, self._result = message, result or self._result

    def collect(self) -> tuple[list[bytes], bytes]:
        return [self._report, *self._others(self._report)], self._result

    def restart(self) -> None:
        pass


class Runner(StepRunner):
    """Samples token 7, or fails."""

    def __init__(self, error: Exception | None) -> None:
        self.spans, self._error = Spans(), error

    def forward_stage(self, plan: StepPlan) -> None:
        if self._error is not None:
            raise self._error

    def forward(self, plan: StepPlan) -> Forward:
        self.forward_stage(plan)
        return cast(Any, SimpleNamespace(rows=OutputRows([]), outputs=None, failed={}))

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        return lambda: StepResult(OutputRows([]), [7], None, {}, {})


def step(pipe: Pipe, error: Exception | None = None) -> tuple[StepResult | Exception, list[str]]:
    """Returns the end of a step, and what the channel to other ranks was aborted with."""
    aborted: list[str] = []
    ranks = cast(WorkerGroup, SimpleNamespace(channel=SimpleNamespace(abort=aborted.append)))
    runner, plan = PipelineRunner(Runner(error), ranks, pipe), StepPlan()
    part = runner.sample(runner.forward(plan))()
    return runner.agree(plan, part), aborted


def with_tokens(checksum: int) -> Callable[[bytes], list[bytes]]:
    """The report of another rank, with the same plan and other sampled tokens."""

    def reports(own: bytes) -> list[bytes]:
        planned, _, why, failed = msgspec.msgpack.decode(own, type=tuple[int, int, str, list[bytes]])
        return [msgspec.msgpack.encode((planned, checksum, why, failed))]

    return reports


def test_an_error_that_all_ranks_have_alike_stays_the_own_error() -> None:
    error = ValueError("no such row")
    assert step(Pipe(1, lambda own: [own]), error) == (error, [])


def test_an_error_of_one_rank_names_the_rank() -> None:
    cause = ValueError("no such row")
    left = msgspec.msgpack.encode((0, 0, "PreviousStageFailed: stage 0 of 2 failed in this step", ()))
    result, aborted = step(Pipe(2, lambda own: [left]), cause)
    assert isinstance(result, RankFailed) and str(result) == "rank 0 of 2: ValueError: no such row" and not aborted


def test_only_ranks_of_the_last_stage_compare_their_tokens() -> None:
    """The others report no checksum of tokens."""
    drawn = encode_result(StepResult(OutputRows([]), [7], None, {}, {}))
    result, _ = step(Pipe(2, with_tokens(5), drawn))
    assert isinstance(result, StepResult) and result.token_ids == [7]
    differing, aborted = step(Pipe(1, with_tokens(5)))
    assert isinstance(differing, DeviceLost) and "the ranks' step 1 differs" in str(differing)
    assert aborted == [str(differing)]


@pytest.mark.parametrize("settings", [{"nnodes": 2}, {"distributed_executor_backend": "external_launcher"}])
def test_stages_on_several_machines_are_refused(settings: dict[str, Any]) -> None:
    facts = Capabilities(4, (torch.float32,), processes=True)
    stages: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    check_stages(EngineConfig("bundled", **stages), "here", facts)
    with pytest.raises(ValueError, match="where ranks meet over a network"):
        check_stages(EngineConfig("bundled", **stages, **settings), "here", facts)
