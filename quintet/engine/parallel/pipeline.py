"""Steps of a pipeline stage: each runs its layers and sends the output on; the last stage samples and sends tokens."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from quintet.engine.executor.model_runner import Forward, StepResult, StepRunner
from quintet.engine.executor.output_rows import OutputRows
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.parallel.step_agreement import crc32, digest, error_text, failed_keys, reconcile
from quintet.engine.pooling.adapted_heads import AdaptedHeads
from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan
from quintet.interface.platform import DeviceLost
from quintet.interface.stage_channel import StageChannel
from quintet.outputs import TokenLogprobs

logger = logging.getLogger(__name__)

LogprobTuple = tuple[list[int], list[float], int]  # TokenLogprobs


class SampledMessage(msgspec.Struct, array_like=True):
    """StepResult for other processes: requests are named by their order."""

    token_ids: list[int]
    sample: list[int]
    verify: list[tuple[int, int]]
    logprobs: list[LogprobTuple] | None
    prompt_logprobs: list[tuple[int, list[LogprobTuple]]]
    failed: list[tuple[int, str]]
    pooled: list[tuple[int, bytes, list[int], str]]  # float32 of a shape, or why there are none


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SampledMessage).decode


def encode_result(result: StepResult) -> bytes:
    pooled = [
        (request.order, b"", [], found) if isinstance(found, str) else (request.order, found.tobytes(), found.shape, "")
        for request, found in result.pooled.items()
    ]
    scored = [(request.order, found) for request, found in result.prompt_logprobs.items()]
    failed = [(request.order, why) for request, why in result.failed.items()]
    rows = result.rows
    sample, verify = [each.order for each in rows.sample], [(each.order, after) for each, after in rows.verify]
    return _encode([result.token_ids, sample, verify, result.logprobs, scored, failed, pooled])


def decode_result(frame: bytes, requests: Iterable[Request]) -> StepResult:
    """Returns the result of a step of these requests."""
    drawn, by_order = _decode(frame), {request.order: request for request in requests}
    rows = OutputRows(
        [by_order[each] for each in drawn.sample], [(by_order[each], after) for each, after in drawn.verify]
    )
    return StepResult(
        rows,
        drawn.token_ids,
        None if drawn.logprobs is None else [TokenLogprobs(*each) for each in drawn.logprobs],
        {by_order[order]: [TokenLogprobs(*each) for each in found] for order, found in drawn.prompt_logprobs},
        {by_order[order]: why for order, why in drawn.failed},
        {
            by_order[order]: why or np.frombuffer(numbers, np.float32).reshape(shape)
            for order, numbers, shape, why in drawn.pooled
        },
    )


@dataclass
class StageForward(Forward):
    """Step of which this stage's part has run, or has failed."""

    requests: Sequence[Request] = ()  # all of the step
    plan_digest: int = 0  # a digest of the plan
    error: Exception | None = None


class PipelineRunner(StepRunner):
    """Steps of an engine with pipeline stages. An error in one stage is reported when the step ends, on all ranks
    alike: until then all plan the same."""

    def __init__(self, inner: StepRunner, ranks: WorkerGroup, pipe: StageChannel) -> None:
        """`inner` runs whole steps, as the last stage does; the others use it for their layers alone."""
        self.spans, self.ranks, self._inner, self._ranks, self._pipe = inner.spans, ranks, inner, ranks, pipe
        self._last = pipe.stage == pipe.stages - 1
        self._broken: Exception | None = None  # why steps fail that start before the failed one has ended
        self._failed = False  # whether the last step that has ended failed
        self._num_collected = 0

    @property
    def has_processors(self) -> bool:
        return self._inner.has_processors

    @property
    def stages(self) -> int:
        return self._pipe.stages

    def adapted_heads(self, saved: Mapping[str, torch.Tensor]) -> AdaptedHeads:
        return self._inner.adapted_heads(saved)

    def warm_up(self, progress: bool) -> None:
        self._inner.warm_up(progress)

    def forward(self, plan: StepPlan) -> StageForward:
        """Runs this stage's layers."""
        self._pipe.begin()
        part = StageForward(OutputRows([]), torch.empty(0), requests=list(plan.tokens), plan_digest=digest(plan))
        try:
            if self._broken is not None:
                raise self._broken
            if self._last:
                given = self._inner.forward(plan)
                part.rows, part.outputs, part.failed = given.rows, given.outputs, given.failed
            else:
                self._inner.forward_stage(plan)
        except DeviceLost:
            raise
        except Exception as error:
            self._give_up(part, error)
        else:
            if not self._last:
                self._pipe.report(_encode((part.plan_digest, 0, "", [])))
        return part

    def sample(self, forward: Forward) -> Callable[[], Any]:
        """Samples, in the last stage; the other stages receive the result when the step ends."""
        assert isinstance(forward, StageForward), "a step of another runner"
        if self._last and forward.error is None:
            try:
                result = self._inner.sample(forward)()
                note = forward.plan_digest, crc32(result.token_ids), "", list[bytes]()
                self._pipe.report(_encode(note), encode_result(result))
            except DeviceLost:
                raise
            except Exception as error:
                self._give_up(forward, error)
        return lambda: forward

    def _give_up(self, part: StageForward, error: Exception) -> None:
        """Fails the step here: then it fails in the stages after this one, too, and on all ranks when it ends."""
        if self._broken is None:
            logger.debug("a step failed in stage %d", self._pipe.stage, exc_info=error)
        self._broken = part.error = error
        if not self._last:
            self._pipe.send(None)
        self._pipe.report(_encode((part.plan_digest, 0, error_text(error), failed_keys(error))))

    def agree(self, plan: StepPlan, part: Any) -> StepResult | Exception:
        """Returns the result of a step on all ranks, or its error."""
        if isinstance(part, DeviceLost):
            return part
        self._num_collected += 1
        try:
            notes, drawn = self._pipe.collect()
        except DeviceLost as error:
            return error
        proposals = [msgspec.msgpack.decode(note, type=tuple[int, int, str, list[bytes]]) for note in notes]
        ranks = len(proposals) // self._pipe.stages
        alike = {token_ids for _, token_ids, *_ in proposals[-ranks:]}
        own = part.error or StepResult(OutputRows([]), [], None, {}, {})
        mixed = [
            (planned + (token_ids if len(alike) > 1 else 0), why, keys) for planned, token_ids, why, keys in proposals
        ]
        result = reconcile(mixed, own, self._num_collected)
        if isinstance(result, DeviceLost):
            channel = self._ranks.channel
            assert channel is not None
            channel.abort(str(result))
        self._failed = isinstance(result, Exception)
        return result if isinstance(result, Exception) else decode_result(drawn, part.requests)

    def start_over(self) -> None:
        """Starts anew with every request, and drops the steps that are under way."""
        self._inner.start_over()
        if self._failed:
            self._pipe.restart()
        self._failed, self._broken = False, None
