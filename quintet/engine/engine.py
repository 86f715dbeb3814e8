"""The engine: add requests, and step until they are done. Token ids in, token deltas out; start here.

A step is three lines: the scheduler plans it, the runner runs it, finish() appends what came out and tells the caller.
Where the device works behind the host, a step is planned and started while the one before it still runs, and what a
call returns is of the step before: the device finds its next step waiting, and the host works while it computes.
Around it stand admission.py (prompts to requests) and output.py (deltas to text); below it, worker.py and a platform.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quintet.engine.flights import Flights
from quintet.engine.grammar import Grammars, wait_for_any
from quintet.engine.interrupts import Uninterrupted
from quintet.engine.request import Admitted, FinishReason, Request
from quintet.engine.runner import Runner, StepResult
from quintet.engine.scheduler import Plan, Scheduler
from quintet.outputs import TokenDelta, TokenLogprobs
from quintet.platforms.interface import ASIDE, DROPPED, CacheLost

logger = logging.getLogger(__name__)

NOT_FINITE = "the model gave no finite logits for this request; its weights or dtype may be at fault"
NOTHING_LEFT = (
    "no token is left to draw: structured_outputs allow none that bad_words, allowed_token_ids or the like leave"
)


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
    num_drafts: int = 0  # times that tokens of a request were guessed
    num_draft_tokens: int = 0  # that were guessed
    num_accepted_tokens: int = 0  # of them, those that were drawn
    asleep: int = 0  # the level; 0: awake


class Engine:
    """Owns the requests between add() and their last delta."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, overlap: bool = False, grammars: Grammars | None = None
    ) -> None:
        self.scheduler, self._runner, self._overlap, self._grammars = scheduler, runner, overlap, grammars
        self._requests: dict[str, Request] = {}
        self._unready: list[Request] = []  # whose grammars are perhaps not compiled yet
        self._flights = Flights(runner)
        self._deltas: list[TokenDelta] = []  # that no call of step() has returned yet
        self.asleep = 0  # the level; 0: awake
        self._num_added = self._num_steps = self._num_computed = self._num_generated = self._step_tokens = 0
        self._num_drafts = self._num_drafted = self._num_accepted = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def busy(self) -> bool:
        """Whether step() has anything to do."""
        return bool(self._requests or self._deltas or self._flights)

    def add(self, admitted: Admitted) -> None:
        """Queues a request; ValueError says why it cannot be, and then nothing has changed."""
        self.check_awake()
        if admitted.request_id in self._requests:
            raise ValueError(f"request id {admitted.request_id!r} is in use; give each running request its own")
        request = Request(admitted, self._num_added)
        if admitted.params.structured_outputs is not None:
            if self._grammars is None:
                raise ValueError("this engine serves no structured_outputs; leave them out")
            request.grammar = self._grammars.matcher(admitted.params.structured_outputs)
            self._unready.append(request)
        self._num_added += 1
        self._requests[admitted.request_id] = request
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
        self.compute()
        return self.take()

    def take(self) -> list[TokenDelta]:
        """What compute() has left."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def compute(self) -> None:
        """step(), but what it added stays here until take(): an interrupted one then loses nobody's tokens."""
        try:
            if self._unready:
                self._heed_grammars()
            if not self._goes_ahead():
                self._land()
            started = self._launch()
            self._land(keep=1 if self._overlap and started else 0)
        except BaseException:  # Ctrl-C, at whatever line: nobody knows what was written
            with Uninterrupted():
                self._start_over()
            raise

    def _heed_grammars(self) -> None:
        """Ends the requests whose grammars cannot be compiled; while all wait for theirs, waits a moment."""
        if len(self._unready) == len(self._requests):
            wait_for_any(request.grammar for request in self._unready)
        with Uninterrupted():
            waiting, self._unready = self._unready, []
            for request in waiting:
                if self._requests.get(request.request_id) is not request or request.grammar is None:
                    continue  # it has ended
                if why := request.grammar.refused():
                    self._deltas.append(self._end_failed(request, f"structured_outputs cannot be served: {why}"))
                elif not request.ready:
                    self._unready.append(request)

    def _goes_ahead(self) -> bool:
        """Whether the next step is planned and started before the host knows what the running one draws.

        Not where pages are so few that somebody might be preempted: the running step may end another, and nobody is.
        Nor where tokens were guessed, for it depends on them how many there are, or can be, after what is drawn.
        """
        if not (self._overlap and self._runner.carries and self.scheduler.has_room()):
            return False
        return not any(plan.num_drafts for plan in self._flights.plans) and not self.scheduler.has_drafts()

    def _launch(self) -> bool:
        """Plans a step, starts its model, and draws: at once, or where the draw looks back on tokens of the running
        step (penalties, grammars, user code that edits logits), when that has landed. Whether all of it went well."""
        plan = self.scheduler.schedule()
        if not plan or not self._flights.start(plan):
            return False
        self.scheduler.advance(plan)
        if self._flights.looks_back:
            self._land(keep=1)
        if not self._flights.draw():
            return False
        if self._overlap and not plan.num_drafts:
            self.scheduler.expect(plan)
        return True

    def _land(self, keep: int = 0) -> None:
        """Takes in what the steps gave, but for the last `keep`. An error of a step, not of one request, ends it for
        all who were in it, and for them alone."""
        for plan, result in self._flights.land(keep):
            if isinstance(result, CacheLost):
                logger.warning("everything is computed again: %s", result)
                self._start_over()
                self._runner.renew_cache()
            elif isinstance(result, Exception):
                self._fail(plan, result)
            else:
                with Uninterrupted():
                    self._deltas += self.finish(plan, result)
                    for known in (plan, *self._flights.plans):
                        self.scheduler.commit_late(known)

    def finish(self, plan: Plan, result: StepResult) -> list[TokenDelta]:
        """Counts what was computed, appends the sampled tokens, ends who is done."""
        self._num_computed += plan.num_prompt_tokens
        self._num_steps += 1
        self._step_tokens = plan.num_tokens
        deltas = [self._end_failed(request, why) for request, why in result.failed.items() if request in plan.tokens]
        for request, found in result.prompt_logprobs.items():
            request.num_scored += len(found)
        after = result.rows.after_drafts()
        for row, request in enumerate(result.rows.sample):
            if request in plan.tokens:  # else it was taken back while the step ran, or had ended before
                deltas += self._take(request, (row, *after.get(request, ())), result)
        drawn = {*result.failed, *result.rows.sample}
        for request, found in result.prompt_logprobs.items():
            if request not in drawn and request in plan.tokens:  # a chunk of a prompt: nothing was drawn yet
                deltas.append(TokenDelta(request.request_id, [], prompt_logprobs=found))
        return deltas

    def _take(self, request: Request, rows: Sequence[int], result: StepResult) -> list[TokenDelta]:
        """What one request's rows drew: a delta for each token, up to the first that is not the draft in its place."""
        drafts, deltas = request.land(), []
        for row, draft in zip(rows, [*drafts, None], strict=False):
            delta = self._append(request, result.token_ids[row])
            if result.logprobs is not None and request.params.logprobs is not None:
                delta.logprobs = [_trim(result.logprobs[row], request.params.logprobs)]
            deltas.append(delta)
            if delta.finish_reason is None and request.grammar is not None and request.grammar.complete:
                deltas.append(self._end(request, FinishReason.STOP))
            accepted = delta.token_ids == [draft]
            self._num_accepted += accepted
            if deltas[-1].finish_reason is not None or not accepted:
                break
        deltas[0].prompt_logprobs = result.prompt_logprobs.get(request)
        if drafts:
            self._num_drafts, self._num_drafted = self._num_drafts + 1, self._num_drafted + len(drafts)
            if deltas[-1].finish_reason is None:
                request.settle()
        return deltas

    def _append(self, request: Request, token_id: int) -> TokenDelta:
        self._num_generated += 1
        if token_id < 0:
            return self._end_failed(request, NOT_FINITE if request.grammar is None else NOTHING_LEFT)
        reason, grammar = request.take(token_id), request.grammar
        if grammar is not None:
            if why := grammar.follow(request):
                return self._end_failed(request, f"structured_outputs ended: {why}")
            if reason is FinishReason.LENGTH and grammar.complete:
                reason = None  # it has said all: _take() ends it
        if reason is None:
            return _delta(request, [token_id])
        asked = reason is FinishReason.STOP and token_id in (request.params.stop_token_ids or ())
        return self._end(request, reason, [token_id], stop=token_id if asked else None)

    def _end(
        self, request: Request, reason: FinishReason, token_ids: Sequence[int] = (), stop: int | None = None
    ) -> TokenDelta:
        self.scheduler.remove(request)
        self._flights.forget(request)
        request.forget_unknown()
        del self._requests[request.request_id]
        return replace(_delta(request, list(token_ids)), finish_reason=reason.value, stop_reason=stop)

    def _end_failed(self, request: Request, why: str) -> TokenDelta:
        """Ends one request because of a failure inside it."""
        return replace(self._end(request, FinishReason.ERROR), error=why)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """The requests in the step end. What it wrote is not known, so all others are computed again, in the same
        cache: a page is written before it is read, and where memory is full there is no room for another."""
        logger.error("a step of %d requests failed", len(plan.tokens), exc_info=error)
        with Uninterrupted():
            why = f"{type(error).__name__}: {error}"
            self._deltas += [self._end_failed(request, why) for request in plan.tokens]
        self._start_over()

    def _start_over(self) -> None:
        """Every request begins again; the steps that run are not waited for."""
        self._flights.clear()
        self.scheduler.start_over(self._requests.values())
        self._runner.begin_again()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached beginnings; running requests keep their pages."""
        self.scheduler.tables.reset()

    def sleep(self, level: int = ASIDE) -> int:
        """Gives the device's memory back until wake_up() -> bytes. The cache is lost; weights are put aside on the host
        (ASIDE), or lost too (DROPPED). ValueError if requests are there; NotImplementedError if the device cannot.
        """
        if level not in (ASIDE, DROPPED):
            raise ValueError(f"level must be {ASIDE} (weights are put aside) or {DROPPED} (dropped), not {level!r}")
        if self.asleep not in (0, level):
            raise ValueError(f"the engine sleeps at level {self.asleep}; wake it up before it sleeps at level {level}")
        if self._requests:
            raise ValueError(f"the engine has {len(self)} requests; let them finish, or abort them, before it sleeps")
        if self.asleep:
            return 0
        self._land()
        self.reset_prefix_cache()
        freed = self._runner.sleep(level)
        self.asleep = level
        logger.info("asleep at level %d: %.2f GiB given back", level, freed / 2**30)
        return freed

    def wake_up(self) -> None:
        """Memory, and the weights as before; those that were dropped are read again. Whatever it raises, the engine is
        still asleep then, and the call may be repeated. Awake already, nothing.
        """
        if self.asleep:
            self._runner.wake()
            self.asleep = 0
            logger.info("awake")

    def reload_weights(self, folder: Path | None) -> None:
        """Other weights of the same model, written over those that are there; nothing is compiled or recorded anew.

        Steps that run are waited for. Requests go on with the tokens that they have: what these left in the cache is
        computed again. ValueError if the folder's weights do not fit, and then nothing has changed.
        """
        self.check_awake()
        self._land()
        with Uninterrupted():
            self._runner.reload(folder)
            self.reset_prefix_cache()
            self._start_over()
        logger.info("weights are those of %s", folder or "load_format='dummy'")

    def check_awake(self) -> None:
        """ValueError while it sleeps."""
        if self.asleep:
            raise ValueError(f"the engine is asleep (level {self.asleep}) and takes no requests; call wake_up() first")

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
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_drafted,
            num_accepted_tokens=self._num_accepted,
            asleep=self.asleep,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        self.scheduler.check_integrity()
        queued = {r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._requests), "the scheduler has other requests than the engine"
        for request in self._requests.values():
            running = sum(request in plan.tokens for plan in self._flights.plans)
            expected = request.num_unknown - request.num_drafts
            assert expected <= running, f"{request} expects tokens of steps that do not run"


def _delta(request: Request, token_ids: list[int]) -> TokenDelta:
    cached, preemptions = request.num_cached, request.num_preemptions
    return TokenDelta(request.request_id, token_ids, num_cached=cached, num_preemptions=preemptions)


def _trim(logprobs: TokenLogprobs, wanted: int) -> TokenLogprobs:
    """The batch computes as many as its greediest request asks for; each gets its own number."""
    if wanted == -1:
        return logprobs
    return TokenLogprobs(logprobs.ids[: wanted + 1], logprobs.values[: wanted + 1], logprobs.rank)
