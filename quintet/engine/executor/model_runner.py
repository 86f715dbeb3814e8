"""Runs a planned step on the workers, samples, and brings what came out to the host."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.output_rows import OutputRows, TokenRows
from quintet.engine.executor.worker import PreviousTokens, Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.observability.spans import Spans
from quintet.engine.pooling.adapted_heads import AdaptedHeads
from quintet.engine.request import PLACEHOLDER, Request
from quintet.engine.row_store.writing import write_rows
from quintet.engine.sampling.logits_processors import ProcessorFailed
from quintet.engine.sampling.prompt_candidates import PromptCandidates
from quintet.engine.sampling.sampler import LogprobTensors, Sampled, Sampler, num_logprobs_of
from quintet.engine.sleep import TAGS
from quintet.engine.step_plan import StepPlan
from quintet.interface.types import HostBatch, Outputs
from quintet.model_loader.weight_files import WeightFiles
from quintet.outputs import TokenLogprobs

if TYPE_CHECKING:
    from quintet.engine.executor.routed_experts import RoutedExpertsStore
    from quintet.engine.pooling.heads import FloatRows

logger = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """Result of a step: a token for each row that draws, and log-probabilities where they were asked for."""

    rows: OutputRows  # those that draw
    token_ids: list[int]  # by row
    logprobs: list[TokenLogprobs] | None  # by row
    prompt_logprobs: dict[Request, list[TokenLogprobs]]
    failed: dict[Request, str]  # requests that cannot go on, and why
    pooled: Mapping[Request, "FloatRows | str"] = {}  # numbers of texts, or why they have none; scores of prompts


Agree = Callable[[StepPlan, StepResult | Exception], StepResult | Exception]


@dataclass
class Forward:
    """A step with a started model, and which of its rows are drawn or scored."""

    rows: OutputRows
    outputs: Tensor  # for each of them: logits, or hidden states
    failed: dict[Request, str] = field(default_factory=dict)  # requests that nothing could be drawn for, and why
    store_experts: Callable[[], None] = lambda: None  # waits for the experts of its tokens


class SampledTokens:
    """Tokens that the last step sampled, on the first rank's device, and their requests."""

    def __init__(self, worker: Worker, size: int) -> None:
        """`size`: as many tokens are kept, where shapes are fixed; else 0."""
        self._worker, self._size = worker, size
        self._wide: dict[int, tuple[Tensor, ...]] = {}  # so many tokens -> what they are brought to that size with
        self._sampled: Tensor | None = None
        self._requests: list[Request] = []

    def store(self, sampled: Tensor, requests: list[Request]) -> None:
        """A step's tokens [R], int32. Where shapes are fixed they are brought to one size, or there would be a program
        for each pair of sizes."""
        if self._size:
            count = sampled.shape[0]
            if count not in self._wide:
                rows = np.full(self._size, -1, np.int32)
                rows[:count] = np.arange(count)
                self._wide[count] = self._worker.upload(np.zeros(self._size, np.int32), rows)
            nothing, places = self._wide[count]
            sampled = self._worker.ops.place_tokens(nothing, sampled, places)
        self._sampled, self._requests = sampled, requests

    def previous_tokens(self, host: HostBatch, plan: StepPlan) -> PreviousTokens | None:
        """Returns the rows of the last step that sampled this step's unknown tokens; None if there are none."""
        unknown = np.flatnonzero(host.token_ids == PLACEHOLDER)
        if self._sampled is None or not len(unknown):
            return None
        requests, places = list(plan.tokens), {request: row for row, request in enumerate(self._requests)}
        rows = np.full(len(host.token_ids), -1, np.int32)
        rows[unknown] = [places[requests[owner]] for owner in host.token_to_seq[unknown].tolist()]
        return PreviousTokens(self._sampled, rows)

    def no_previous_tokens(self, tokens: int) -> PreviousTokens | None:
        """Returns the input of a step of so many tokens that takes none of the kept ones."""
        return None if self._sampled is None else PreviousTokens(self._sampled, np.full(tokens, -1, np.int32))


class StepRunner:
    """Base of the runners of a model: generation, pooling and pipeline stages.

    A step has two halves, both called in torch's inference mode: forward() starts the model, draw() the rest.
    """

    def __init__(self, ranks: WorkerGroup, batches: BatchBuilder, spans: Spans | None, agreement: Agree | None) -> None:
        """agreement: on how each step ended, where ranks are processes (parallel/step_agreement.py)."""
        self.spans, self.ranks = spans or Spans(), ranks
        self._ranks, self._batches, self._fixed, self._agreement = ranks, batches, batches.fixed, agreement
        self._device = ranks.workers[0].device
        self.token_rows: TokenRows | None = None  # of the last step, where a draft head reads its hidden states
        self.routed_experts: RoutedExpertsStore | None = None  # of all tokens, where they are returned

    @property
    def supports_overlap(self) -> bool:
        """True if a step may be started before the host knows the results of the one before it."""
        return False

    @property
    def has_processors(self) -> bool:
        """True if user code (logits processors) may change the sampled tokens."""
        return False

    @property
    def stages(self) -> int:
        """Pipeline stages: so many steps run at the same time."""
        return 1

    def adapted_heads(self, saved: Mapping[str, Tensor]) -> AdaptedHeads:
        """Returns the pooling heads that an adapter's tensors change: none, where no head is behind the model."""
        return AdaptedHeads()

    def forward(self, plan: StepPlan) -> Forward:
        """Starts the model."""
        raise NotImplementedError

    def forward_stage(self, plan: StepPlan) -> None:
        """Runs the model of a pipeline stage that is not the last: its outputs go to the next stage."""
        host, _ = self._built(plan)
        self._ranks.run(host)
        if self.spans.events is not None:
            self.spans.lap("start", plan)

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        """Starts the work on the model's outputs (sampling or pooling); calling the result waits for it."""
        raise NotImplementedError

    def needs_previous_tokens(self, forward: Forward) -> bool:
        """True if the host must have the results of the step before to draw this one."""
        return False

    def agree(self, plan: StepPlan, result: StepResult | Exception) -> StepResult | Exception:
        """Returns how a step ended on all ranks."""
        return result if self._agreement is None else self._agreement(plan, result)

    def warm_up(self, progress: bool) -> None:
        """Runs an empty step of each size, to compile them now."""

    def start_over(self) -> None:
        """Every request starts anew: nothing that was settled for a step holds."""

    def recreate_cache(self) -> None:
        """Replaces a cache that a failed step may have destroyed."""
        self._ranks.map_workers(lambda worker: worker.recreate_cache())

    def sleep(self, level: int) -> int:
        """Gives memory back on every rank -> bytes; all sleep, or none."""
        try:
            return sum(self._ranks.map_workers(lambda worker: worker.sleep(level)))
        except NotImplementedError:  # nothing was let go
            raise
        except BaseException:
            self.wake()
            raise

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Restores memory and weights; after an error the call may be repeated."""
        self._ranks.map_workers(lambda worker: worker.wake(tags))

    def reload(self, folder: Path | WeightFiles | None) -> None:
        """Replaces the weights on every rank."""
        self._ranks.map_workers(lambda worker: worker.reload(folder))

    def _built(self, plan: StepPlan) -> tuple[HostBatch, OutputRows]:
        """Builds the step's arrays, and the rows of its outputs. Writes the rows of the row store that it reads."""
        if plan.row_writes:
            write_rows(self._ranks, plan.row_writes)
        built = self._batches.build(plan)
        if self.token_rows is not None:
            self.token_rows.note(plan)
        if self.spans.events is not None:
            self.spans.lap("build batch", plan)
        return built


class ModelRunner(StepRunner):
    """Runs the model of a scheduler's plan, and samples. Sampling is done on the sampler's device: it may be the host.

    With `overlap`, sampled tokens stay on the device for the next step, and its model may be started before the wait;
    only a draw that looks back needs them on the host.
    """

    def __init__(
        self,
        ranks: WorkerGroup,
        sampler: Sampler,
        batches: BatchBuilder,
        overlap: bool = False,
        spans: Spans | None = None,
        agreement: Agree | None = None,
    ) -> None:
        super().__init__(ranks, batches, spans, agreement)
        self._sampler, self._device = sampler, sampler.device
        self._kept: SampledTokens | None = None
        if overlap and sampler.device is ranks.workers[0].device:
            self._kept = SampledTokens(ranks.workers[0], max((each.rows for each in self._fixed), default=0))

    @property
    def supports_overlap(self) -> bool:
        return self._kept is not None

    @property
    def has_processors(self) -> bool:
        return self._sampler.has_processors

    def needs_previous_tokens(self, forward: Forward) -> bool:
        """True if the host must know all tokens before the step's rows before it draws them."""
        return self._sampler.needs_previous_tokens(forward.rows.sample)

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Runs an empty step of each size, and all that sampling can do with its logits, to compile them now."""
        seen: set[int] = set()
        shown = progress and bool(self._fixed)
        # the first comes twice: the second time, as all that follow, it takes what the one before sampled
        buckets = [*self._fixed[:1], *self._fixed]
        for bucket in tqdm(buckets, desc="Warming up", unit="size", disable=not shown, leave=False):
            carried = None if self._kept is None else self._kept.no_previous_tokens(bucket.tokens)
            logits = self._logits(self._ranks.run(bucket.batch, carried))
            if bucket.rows not in seen:
                seen.add(bucket.rows)
                self._sampler.warm_up(logits)
                if self._kept is not None:
                    self._kept.store(self._sampler.completion_marker(logits), [])
            self._device.to_host(logits)()  # waits for the step

    def forward(self, plan: StepPlan) -> Forward:
        """Starts the model. Tokens that the step before draws are taken on the device: it must have been drawn."""
        host, rows = self._built(plan)
        outputs = self._ranks.run(host, None if self._kept is None else self._kept.previous_tokens(host, plan))
        if self.spans.events is not None:
            self.spans.lap("start", plan)
        forward = Forward(rows, self._logits(outputs))
        if (store := self.routed_experts) is not None:
            forward.store_experts = store.fetch(host, outputs.routed_experts, self._ranks.workers[0].device)
        return forward

    def sample(self, forward: Forward) -> Callable[[], StepResult]:
        """Samples, and starts the copies of what comes out; calling the result waits for them. Steps are drawn in the
        order in which they were started, each before the model of the next one is."""
        drawn = self._draw(forward)

        def wait() -> StepResult:
            result = drawn()
            forward.store_experts()
            return result

        return wait

    def _draw(self, forward: Forward) -> Callable[[], StepResult]:
        """Starts sampling."""
        rows, logits, failed = forward.rows, forward.outputs, forward.failed
        scores = self._score_prompts(logits, rows)
        sampled, rows = self._sample(logits, rows, failed)
        if sampled is None:  # the caller waits for the step all the same, or it would run ahead of the device
            return self._settled(logits, lambda: scores()._replace(failed=failed))
        requests = rows.sampled_requests
        if self._kept is not None:
            self._kept.store(sampled.token_ids, requests)
        token_ids, count = self._device.to_host(sampled.token_ids), len(requests)
        logprobs = None if sampled.logprobs is None else self._fetch(sampled.logprobs)

        def wait() -> StepResult:
            listed = None
            if logprobs is not None:
                found = logprobs()
                listed = _to_token_logprobs(
                    found, slice(count), _max_logprobs(num_logprobs_of(r.params) for r in requests)
                )
                if found.named:
                    listed = _add_named_tokens(listed, requests, [column[:, 0].tolist() for column in found.named])
            return scores()._replace(rows=rows, token_ids=token_ids().tolist()[:count], logprobs=listed, failed=failed)

        return wait

    def _settled(self, logits: Tensor, result: Callable[[], StepResult]) -> Callable[[], StepResult]:
        """The result, once the logits are there."""
        if logits.shape[0]:
            done = self._device.to_host(self._sampler.completion_marker(logits))
        elif self._kept is None:  # no logits were wanted (shapes are not fixed)
            return result
        else:  # what is uploaded now comes home when the step has run
            done = self._device.to_host(self._device.to_device([np.zeros(1, np.int32)])[0])

        def wait() -> StepResult:
            done()
            return result()

        return wait

    def start_over(self) -> None:
        """Every request starts anew: nothing that was settled for a step holds."""
        self._sampler.start_over()

    def _logits(self, outputs: Outputs) -> Tensor:
        """Returns the logits of a step, where they are sampled."""
        logits, device = outputs.logits, self._ranks.workers[0].device
        assert logits is not None, "a model that gives no logits does not sample"
        return logits if device is self._device else device.to_host(logits)()

    def _sample(
        self, logits: Tensor, rows: OutputRows, failed: dict[Request, str]
    ) -> tuple[Sampled | None, OutputRows]:
        """Samples; None if no row is left. If a request's logits processor fails, the request moves from the rows to
        `failed`; if it fails after a draft, only the rows from there on go: perhaps that draft is not drawn."""
        while rows.sample:
            try:
                return self._sampler(logits, rows.sampled_requests, rows.positions), rows
            except ProcessorFailed as error:
                if error.row < len(rows.sample):
                    whose = rows.sample[error.row]
                    logger.error("request %s: %s", whose.request_id, error, exc_info=error)
                    failed[whose] = str(error)
                rows, kept = rows.without_row(error.row)
                logits = torch.cat([logits[row : row + 1] for row in kept]) if kept else logits[:0]
        return None, rows

    def _score_prompts(self, logits: Tensor, rows: OutputRows) -> Callable[[], StepResult]:
        """The rows after those that sample belong to prompts: -> their log-probabilities, in an else empty result."""
        nothing = StepResult(OutputRows([]), [], None, {}, {})
        if not rows.score:
            return lambda: nothing
        own, wanted = np.zeros((2, logits.shape[0]), np.int32)
        start, places = len(rows.sample) + len(rows.verify), {}
        for request, first, count in rows.score:
            places[request] = slice(start, start + count)
            own[places[request]] = request.token_ids[first + 1 : first + 1 + count]
            wanted[places[request]] = request.params.prompt_logprobs is not None
            start += count
        candidates = PromptCandidates.of_step(rows.score, places, logits.shape[0])
        most = _max_logprobs(request.params.prompt_logprobs for request in places)
        fetched = self._fetch(self._sampler.prompt_logprobs(logits, own, wanted, most, candidates.columns))

        def wait() -> StepResult:
            found = fetched()
            listed = {
                request: _to_token_logprobs(found, at, request.params.prompt_logprobs)
                for request, at in places.items()
                if request.params.prompt_logprobs is not None
            }
            return nothing._replace(prompt_logprobs=listed, pooled=candidates.scores(found.named))

        return wait

    def _fetch(self, tensors: LogprobTensors) -> Callable[[], LogprobTensors]:
        """The same on the host. The copies are started together; calling the result waits for all."""
        waiting = [self._device.to_host(tensor) for tensor in (*tensors[:3], *tensors.named)]

        def wait() -> LogprobTensors:
            ids, values, ranks, *named = [each() for each in waiting]
            return LogprobTensors(ids, values, ranks, tuple(named))

        return wait


def _max_logprobs(numbers: Iterable[int | None]) -> int:
    """The largest number of log-probabilities that is asked for; -1 is all, None is not asked for."""
    asked = {number for number in numbers if number is not None}
    return -1 if -1 in asked else max(asked, default=0)


def _to_token_logprobs(tensors: LogprobTensors, rows: slice, num: int | None) -> list[TokenLogprobs]:
    """These rows of tensors on the host, with the `num` likeliest tokens of each; -1 is all that there are."""
    columns = slice(None if num is None or num < 0 else num + 1)
    ids, values, ranks = tensors.token_ids[rows, columns], tensors.logprobs[rows, columns], tensors.ranks[rows]
    return [TokenLogprobs(*row) for row in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)]


def _add_named_tokens(
    listed: list[TokenLogprobs], requests: Sequence[Request], columns: Sequence[Sequence[float]]
) -> list[TokenLogprobs]:
    """Adds the tokens that a row's request names after its own; columns[k][row] is the log-probability of its k-th."""
    found = []
    for row, (each, request) in enumerate(zip(listed, requests, strict=True)):
        named = request.params.logprob_token_ids
        if named:
            values = [columns[at][row] for at in range(len(named))]
            each = TokenLogprobs([each.ids[0], *named], [each.values[0], *values], each.rank)
        found.append(each)
    return found
