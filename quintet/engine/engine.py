"""The engine: add requests, and step until they are done. Token ids in, token deltas out; start here.

A step is three lines: the scheduler plans it, the runner runs it, finish() appends what came out and tells the caller.
Where the device works behind the host, the step is left running, and its results are what the next call returns.
Around it stand admission.py (prompts to requests) and output.py (deltas to text); below it, worker.py and a platform.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from quintet.engine.request import FinishReason, Request
from quintet.engine.runner import Runner, StepResult
from quintet.engine.scheduler import Plan, Scheduler
from quintet.outputs import TokenDelta, TokenLogprobs
from quintet.platforms.interface import CacheLost

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOT_FINITE = "the model gave no finite logits for this request; its weights or dtype may be at fault"


@dataclass(frozen=True)
class Stats:
    """The engine at a glance; counters run from its start."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of the pages that requests hold
    num_steps: int
    step_tokens: int  # of the last step
    num_prompt_tokens: int  # computed, so without those found in the prefix cache
    num_generation_tokens: int
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there


class Flight(NamedTuple):
    """A step that was started."""

    plan: Plan
    wait: Callable[[], StepResult]


class Engine:
    """Owns the requests between add() and their last delta."""

    def __init__(self, scheduler: Scheduler, runner: Runner, overlap: bool = False) -> None:
        self.scheduler, self._runner, self._overlap = scheduler, runner, overlap
        self._requests: dict[str, Request] = {}
        self._flight: Flight | None = None  # the step that runs
        self._deltas: list[TokenDelta] = []  # that no call of step() has returned yet
        self._num_added = self._num_steps = self._num_computed = self._num_generated = self._step_tokens = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def busy(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._requests or self._deltas)

    def add(self, request: Request) -> None:
        """Queues a request that admission has checked."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use; give each running request its own")
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and frees their pages; ids that are not running are passed over.

        No delta follows: the caller knows, and may have given the id to another request by the next step.
        """
        ids = set(request_ids)
        self._deltas = [delta for delta in self._deltas if delta.request_id not in ids]
        for request_id in ids & set(self._requests):
            self._end(self._requests[request_id], FinishReason.ABORT)

    def step(self) -> list[TokenDelta]:
        """One step for everybody -> what it added to each request; with overlap, what the step before it added.

        The caller's work on these deltas then goes on while the device computes the next ones.
        """
        self._land()
        self._launch()
        if not self._overlap:
            self._land()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _launch(self) -> None:
        """Schedules a step and starts it."""
        plan = self.scheduler.schedule()
        if plan:
            wait = self._guarded(plan, lambda: self._runner.launch(plan))
            self._flight = None if wait is None else Flight(plan, wait)

    def _land(self) -> None:
        """Waits for the step that runs, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None:
            result = self._guarded(flight.plan, flight.wait)
            self._deltas += [] if result is None else self.finish(flight.plan, result)

    def _guarded(self, plan: Plan, work: Callable[[], T]) -> T | None:
        """An error of a step, not of one request, ends it for all who were in it, and for them alone: None."""
        try:
            return work()
        except CacheLost as error:
            logger.warning("everything is computed again: %s", error)
            self.scheduler.undo(plan)
            self._begin_again()
            return None
        except Exception as error:
            self._deltas += self._fail(plan, error)
            return None
        except BaseException:  # Ctrl-C: nobody knows what was written
            self.scheduler.take_back(plan)
            raise

    def finish(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Counts the computed tokens, appends the sampled ones, ends who is done."""
        self._num_computed += sum(
            min(count, request.num_prompt - request.num_computed)
            for request, count in plan.tokens.items()
            if request.num_computed < request.num_prompt
        )
        self.scheduler.advance(plan)
        self._num_steps += 1
        self._step_tokens = plan.num_tokens
        deltas = [self._end_failed(request, why) for request, why in result.failed.items() if request in plan.tokens]
        for request, found in result.prompt_logprobs.items():
            request.num_scored += len(found)
        sampled = set(result.failed)
        for row, (request, token_id) in enumerate(zip(result.sampling, result.token_ids, strict=True)):
            sampled.add(request)
            if request not in plan.tokens:  # it was taken back while the step ran
                continue
            self._num_generated += 1
            if token_id < 0:
                deltas.append(self._end_failed(request, NOT_FINITE))
                continue
            logprobs = None
            if result.logprobs is not None and request.params.logprobs is not None:
                logprobs = [_trim(result.logprobs[row], request.params.logprobs)]
            delta = self._append(request, token_id)
            delta.logprobs = logprobs
            delta.prompt_logprobs = result.prompt_logprobs.get(request)
            deltas.append(delta)
        for request, found in result.prompt_logprobs.items():
            if request not in sampled and request in plan.tokens:  # a chunk of a prompt: nothing was drawn yet
                deltas.append(TokenDelta(request.request_id, [], prompt_logprobs=found))
        return deltas

    def _append(self, request: Request, token_id: int) -> TokenDelta:
        request.token_ids.append(token_id)
        output = request.num_output
        if token_id in request.stop_ids and output >= request.params.min_tokens:
            asked = token_id in (request.params.stop_token_ids or ())
            return self._end(request, FinishReason.STOP, [token_id], token_id if asked else None)
        if output >= request.max_tokens:
            return self._end(request, FinishReason.LENGTH, [token_id])
        return TokenDelta(
            request.request_id,
            [token_id],
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
        )

    def _end(
        self, request: Request, reason: FinishReason, token_ids: list[int] | None = None, stop: int | None = None
    ) -> TokenDelta:
        self.scheduler.remove(request)
        if self._flight is not None:
            self._flight.plan.tokens.pop(request, None)  # the step that runs may go on, and nobody looks at its result
        del self._requests[request.request_id]
        request.finish_reason, request.stop_reason = reason, stop
        return TokenDelta(
            request.request_id,
            token_ids or [],
            finish_reason=reason.value,
            stop_reason=stop,
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
        )

    def _end_failed(self, request: Request, why: str) -> TokenDelta:
        """Ends one request because of a failure inside it."""
        delta = self._end(request, FinishReason.ERROR)
        delta.error = why
        return delta

    def _fail(self, plan: Plan, error: Exception) -> list[TokenDelta]:
        """The requests in the step end. The cache may have gone with it: all others are computed again."""
        logger.error("a step of %d requests failed", len(plan.tokens), exc_info=error)
        self.scheduler.undo(plan)
        deltas = [self._end_failed(request, f"{type(error).__name__}: {error}") for request in plan.tokens]
        self._begin_again()
        return deltas

    def _begin_again(self) -> None:
        self.scheduler.start_over()
        self._runner.renew_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached beginnings; running requests keep their pages."""
        self.scheduler.pool.reset_cache()

    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.num_used / (scheduler.pool.num_pages - 1),
            num_steps=self._num_steps,
            step_tokens=self._step_tokens,
            num_prompt_tokens=self._num_computed,
            num_generation_tokens=self._num_generated,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_queries,
            prefix_hits=scheduler.num_hits,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        self.scheduler.check_integrity()
        queued = {r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._requests), "the scheduler has other requests than the engine"


def _trim(logprobs: TokenLogprobs, wanted: int) -> TokenLogprobs:
    """The batch computes as many as its greediest request asks for; each gets its own number."""
    if wanted == -1:
        return logprobs
    return TokenLogprobs(logprobs.ids[: wanted + 1], logprobs.values[: wanted + 1], logprobs.rank)
