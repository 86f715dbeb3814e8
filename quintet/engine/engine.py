"""The engine: add requests, and step until they are done. Token ids in, token deltas out; start here.

A step is three lines: the scheduler plans it, the runner runs it, finish() (step_output.py) appends the tokens and
builds deltas for the caller. Optional parts (a KV connector, a balancer of experts, traces) are hooks (step_hook.py).
Where the device works behind the host, a step is planned and started while the one before it still runs (in_flight.py),
and what a call returns is of the step before: the device finds its next step waiting, the host works while it computes.
Around it stand input_processor.py (prompts to requests) and output_processor.py (deltas to text); below it, the worker
(executor/) and a platform.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from quintet.common.interrupts import DeferredSigint
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.in_flight import InFlightSteps
from quintet.engine.lora.loaded import LoadedLoRA
from quintet.engine.lora.stats import lora_stats
from quintet.engine.needs import needs_of, refusal, wait_for_any
from quintet.engine.observability.stats import EncoderStats, LoRAStats, Stats
from quintet.engine.repetition_detection import RepetitionDetector
from quintet.engine.request import CoreRequest, FinishReason, Request
from quintet.engine.row_store.media import EncodingFailed
from quintet.engine.sleep import check_sleep, check_weights_awake, parts_to_wake
from quintet.engine.step_output import StepOutputProcessor
from quintet.engine.step_plan import StepPlan
from quintet.engine.weight_transfer.between_steps import BetweenSteps, EngineCalls
from quintet.engine.weight_transfer.controls import Controls
from quintet.engine.weight_transfer.orders import WeightOrder
from quintet.interface.platform import ASIDE, DROPPED, CacheLost, DeviceLost
from quintet.model_loader.weight_files import WeightFiles
from quintet.outputs import TokenDelta
from quintet.structured_output.grammar import LATE_MESSAGE, Matcher

logger = logging.getLogger(__name__)


class Engine:
    """Owns the requests between add() and their last delta."""

    def __init__(self, parts: EngineParts) -> None:
        self.scheduler: Final = parts.scheduler
        self.profiler: Final = parts.profiler
        self._runner, self._overlap, self._grammars = parts.runner, parts.overlap, parts.grammars
        self._hooks, self.lora, self.drafting, self._rotary = parts.hooks, parts.lora, parts.drafting, parts.rotary
        self._unready: list[Request] = []  # requests with grammars and adapters that may not be there yet
        self._in_flight = InFlightSteps(parts.runner)
        routed = parts.runner.routed_experts
        jumps = not parts.runner.has_processors and routed is None
        self._answers = StepOutputProcessor(parts.scheduler, self._in_flight, jumps, parts.drafting, routed)
        self._deltas: list[TokenDelta] = []  # that no call of step() has returned yet
        self.asleep = 0  # the level; 0: awake
        self._weights_awake = False  # while it is asleep, the cache alone is gone
        calls = EngineCalls(
            lambda: self._collect(), lambda: self._start_over(), lambda: self.reset_prefix_cache(),
            lambda delta: self._deltas.append(delta), self._check_weights,
        )  # fmt: skip
        between = BetweenSteps(parts.scheduler, self._answers, parts.hooks, calls)
        self.controls: Final = Controls(parts.runner.ranks, between, parts.config, self._agree)
        self._num_added = 0
        self._losses = 0  # of the cache, since a step landed
        self._staged = parts.runner.stages > 1  # several steps run, and no request samples in two of them
        self._ahead = parts.runner.stages - 1 if self._staged else int(parts.overlap)  # steps that are left running

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._answers.requests)

    @property
    def busy(self) -> bool:
        """True if step() has anything to do."""
        return bool(self._answers.requests or self._deltas or self._in_flight)

    def add(self, admitted: CoreRequest) -> None:
        """Queues a request; ValueError says why it cannot be, and then nothing has changed."""
        self.check_awake()
        if admitted.request_id in self._answers.requests:
            raise ValueError(f"request id {admitted.request_id!r} is in use; give each running request its own")
        request = Request(admitted, self._num_added)
        circles = admitted.params.repetition_detection
        if circles is not None and circles.max_pattern_size:
            request.repetition = RepetitionDetector(circles)
        request.grammar, request.lora = self._matcher(admitted), self._adapter(admitted)
        if admitted.media and self._rotary is not None:
            request.rotary = self._rotary.positions(admitted)
        if needs_of(request):
            self._unready.append(request)
        self._num_added += 1
        self._answers.requests[admitted.request_id] = request
        self.scheduler.add(request)

    def _matcher(self, admitted: CoreRequest) -> Matcher | None:
        """Returns the place of a request's output in its grammar, which begins to be compiled."""
        if admitted.grammar and self._grammars is None:
            raise ValueError("this engine serves no structured_outputs; leave them out")
        return self._grammars.matcher(admitted.grammar) if admitted.grammar and self._grammars else None

    def _adapter(self, admitted: CoreRequest) -> LoadedLoRA | None:
        """Returns a request's adapter, which is read when there is room for it."""
        if admitted.lora is None:
            return None
        if self.lora is None:
            raise ValueError("this engine has no adapters; start it with enable_lora=True, or leave lora_request out")
        return self.lora.load(admitted.lora)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once and frees their pages; ids that are not running are passed over.

        No delta follows: the caller knows, and may have given the id to another request by the next step.
        """
        ids = dict.fromkeys(request_ids)  # in their order: every rank frees the same pages first
        self._deltas = [delta for delta in self._deltas if delta.request_id not in ids]
        for request_id in ids:
            if request_id in self._answers.requests:
                self._answers.end(self._answers.requests[request_id], FinishReason.ABORT)

    def step(self) -> list[TokenDelta]:
        """Runs one step -> what it added to each request; with overlap, what the step before it added.

        The caller's work on these deltas then goes on while the device computes the next ones.
        """
        self.compute()
        return self.take_deltas()

    def take_deltas(self) -> list[TokenDelta]:
        """Returns and clears the deltas of compute()."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def compute(self) -> None:
        """Like step(), but its deltas stay here until take(), so that an interruption loses no tokens. While the engine
        is paused it waits a moment."""
        self.controls.settle()
        if self.controls.is_paused:
            return self.controls.wait()
        try:
            for hook in self._hooks:
                if hook.waits_for_steps:
                    self._collect()
                hook.before_step(self._fail_request)
            self._advance_adapters()
            if self._unready:
                self._check_needs()
            self._end_late_requests()
            if self._in_flight and not self._can_start_next():
                self._collect()
            started = self._launch()
            self._collect(keep=self._num_left_running(started))
            for hook in reversed(self._hooks):
                hook.after_compute(self.scheduler, running=started or bool(self._in_flight))
        except BaseException:  # Ctrl-C, at any line: what was written is not known
            with DeferredSigint():
                self._start_over()
            raise

    def wait_for_needs(self) -> None:
        """Waits until the grammar and the adapter of every request are there, or have failed."""
        for request in self._unready:
            for need in needs_of(request):
                need.wait()

    def _advance_adapters(self) -> None:
        """Has adapters read in the order of the requests that wait; they may take the places of others, whose requests
        wait behind them."""
        if self.lora is None or not self.lora.is_short:
            return
        running = {each.lora.digest for each in self.scheduler.running if each.lora is not None}
        if self.lora.advance((each.lora for each in self.scheduler.waiting if each.lora is not None), (), running):
            self._unready = [request for request in self.scheduler.waiting if not request.ready]

    def _check_needs(self) -> None:
        """Ends requests that cannot have what they need; while all wait for that, waits a moment."""
        if len(self._unready) == len(self._answers.requests):
            wait_for_any(need for request in self._unready for need in needs_of(request) if not need.ready)
        with DeferredSigint():
            waiting, self._unready = self._unready, []
            for request in waiting:
                if self._answers.requests.get(request.request_id) is not request:
                    continue  # it has ended
                if why := refusal(needs_of(request)):
                    self._fail_request(request, why)
                    if request.lora is not None and self.lora is not None and request.lora.refused():
                        self.lora.forget(request.lora.digest)
                elif not request.ready:
                    self._unready.append(request)

    def _end_late_requests(self) -> None:
        """Ends requests whose grammars make all steps slow."""
        for request in self._late_requests():
            self._fail_request(request, LATE_MESSAGE)

    def _late_requests(self) -> list[Request]:
        """Returns the requests whose grammars take more than their share of time, of all that run."""
        slow = [(r, r.grammar) for r in self.scheduler.running if r.grammar is not None and r.grammar.is_slow]
        return [request for request, matcher in slow if matcher.is_late(len(slow))]

    def _fail_request(self, request: Request, why: str) -> None:
        self._deltas.append(self._answers.fail(request, why))

    def _fail_planned(self, plan: StepPlan, request: Request, why: str) -> None:
        """Ends a request of a step that was not started."""
        with DeferredSigint():
            self.scheduler.drop_planned(plan, request)
            self._fail_request(request, why)

    def _can_start_next(self) -> bool:
        """True if the next step is planned and started before the host knows what the running one draws.

        Not if pages are so few that a request might be preempted: the running step may end another and free pages. Nor
        with drafts: the number of tokens after the draw depends on how many are accepted. Nor where a grammar decides
        several tokens.
        """
        if self._staged:
            return self.scheduler.has_room()
        if not (self._overlap and self._runner.supports_overlap and self.scheduler.has_room()):
            return False
        guessed = any(plan.num_drafts for plan in self._in_flight.plans)
        drafts = self.drafting is not None and self.drafting.may_propose(self.scheduler.running)
        return not (guessed or drafts or self._answers.will_append_forced())

    def _num_left_running(self, started: bool) -> int:
        """Steps that are left running at the end of compute(); if none was started, the oldest of several ends."""
        if started:
            return self._ahead
        return max(0, len(self._in_flight) - 1) if self._ahead > 1 else 0

    @torch.inference_mode()  # for both halves: to enter it takes microseconds
    def _launch(self) -> bool:
        """Plans a step, starts its model, and draws: at once, or, where the draw depends on tokens of the running step
        (penalties, grammars, user code that edits logits), when that has landed. Returns whether all of it worked."""
        if self.drafting is not None:
            try:
                self.drafting.propose(self.scheduler.draft_room())
            except CacheLost as error:
                self._fail(StepPlan(), error)
                return False
        plan = self.scheduler.schedule()
        for hook in self._hooks:
            hook.before_launch(plan, partial(self._fail_planned, plan))
        if not plan or not self._in_flight.start(plan):
            return False
        self.scheduler.mark_started(plan)
        if self._in_flight.needs_previous_tokens:
            self._collect(keep=1)
        if not self._in_flight.sample():
            return False
        if self._overlap and not plan.num_drafts:
            self.scheduler.reserve_sampled(plan, self._in_flight.failed)
        return True

    def _collect(self, keep: int = 0) -> None:
        """Collects the results of all steps but the last `keep`. An error of a step, not of one request, ends all
        requests in it, and no others."""
        for plan, result in self._in_flight.collect(keep):
            if isinstance(result, Exception):
                self._fail(plan, result)
            else:
                with DeferredSigint():
                    self._losses = 0
                    self._deltas += self._answers.finish(plan, result)
                    for each in (plan, *self._in_flight.plans):
                        if each.late_commits:
                            self.scheduler.commit_late(each)
                for hook in self._hooks:
                    hook.after_step(plan)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """The requests in the step end. What it wrote is not known, so all others are computed again, in the same
        cache: a page is written before it is read, and where memory is full there is no room for another. If the
        cache is lost, no request ends, unless it is lost twice without a step between: then the step may be why. If the
        device is lost, the error ends the engine."""
        if isinstance(error, DeviceLost):
            raise error
        lost = isinstance(error, CacheLost)
        self._losses = self._losses + 1 if lost else 0
        if self._losses == 1:
            logger.warning("everything is computed again: %s", error)
        else:
            logger.error("a step of %d requests failed", len(plan.tokens), exc_info=error)
            with DeferredSigint():
                why = f"{type(error).__name__}: {error}"
                ended = dict.fromkeys(plan.tokens, why)
                if isinstance(error, EncodingFailed):
                    ended = error.requests(plan.tokens)
                self._deltas += [self._answers.fail(request, why) for request, why in ended.items()]
        self._start_over()
        if lost:
            self._runner.recreate_cache()

    def _start_over(self) -> None:
        """Every request begins again; the steps that run are not waited for."""
        self._in_flight.clear()
        self.scheduler.start_over(self._answers.requests.values())
        self._runner.start_over()
        if self.drafting is not None:
            self.drafting.start_over()
        for hook in self._hooks:
            hook.start_over()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached beginnings; running requests keep their pages."""
        self.scheduler.kv_cache_manager.reset()
        for hook in self._hooks:
            hook.reset_prefix_cache()

    def sleep(self, level: int = ASIDE) -> int:
        """Gives the device's memory back until wake_up() -> bytes. The cache is lost; weights are put aside on the host
        (ASIDE), or lost too (DROPPED). ValueError if requests are there; NotImplementedError if the device cannot.
        """
        check_sleep(level, self.asleep, len(self), bool(self.controls.state.phase))
        if self.asleep:
            return 0
        self._collect()
        self.reset_prefix_cache()
        freed = self._runner.sleep(level)
        self.asleep, self._weights_awake = level, False
        logger.info("asleep at level %d: %.2f GiB given back", level, freed / 2**30)
        return freed

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restores memory and weights; dropped weights are read again. If it raises, the engine is still asleep, and
        the call may be repeated. Does nothing if the engine is awake. `tags`: parts to wake, weights before kv_cache.
        """
        parts = parts_to_wake(tags, self.asleep, self._weights_awake)
        self._runner.wake(parts)
        if "weights" in parts:
            self._weights_awake = True
            if self.asleep == DROPPED:
                self.controls.reloaded()
        if "kv_cache" in parts:
            self.asleep = 0
            for hook in self._hooks:  # what they counted was lost with the weights
                hook.start_over()
            logger.info("awake")

    def reload_weights(self, folder: Path | WeightFiles | None) -> None:
        """Overwrites the weights with others of the same model; nothing is compiled or recorded anew.

        Steps that run are waited for. Requests go on with the tokens that they have: what these left in the cache is
        computed again. ValueError if the folder's weights do not fit, and then nothing has changed.
        """
        self._check_weights()
        self._collect()
        with DeferredSigint():
            self._runner.reload(folder)
            self.controls.reloaded()
            for hook in self._hooks:
                hook.reload_weights(folder)
            self.reset_prefix_cache()
            self._start_over()
        logger.info("weights are those of %s", folder or "load_format='dummy'")

    def check_awake(self) -> None:
        """ValueError while it sleeps, or its weights are torn."""
        self.controls.settle()
        if why := self.controls.refusal:
            raise ValueError(why)
        if self.asleep:
            raise ValueError(f"the engine is asleep (level {self.asleep}) and takes no requests; call wake_up() first")

    def _check_weights(self) -> None:
        """ValueError while the weights sleep."""
        check_weights_awake(self.asleep, self._weights_awake)

    def _agree(self, order: WeightOrder, work: Callable[[], Any]) -> Any:
        """Carries out an order on all ranks."""
        return work()

    def close(self) -> None:
        """Ends threads, and what they write."""
        self.controls.close()
        for hook in self._hooks:
            hook.close()

    def stats(self) -> Stats:
        """Returns the stats of all parts."""
        answers, encoder = self._answers, self.scheduler.kv_cache_manager.encoder
        stats = Stats(
            self.scheduler.stats(), answers.step_stats(), answers.spec_decode_stats(),
            asleep=self.asleep, num_deferred=len(self._unready), weights=self.controls.stats(),
            lora=LoRAStats() if self.lora is None else lora_stats(self.scheduler.running, self.scheduler.waiting),
            encoder=EncoderStats() if encoder is None else encoder.stats(),
        )  # fmt: skip
        for hook in self._hooks:
            stats = hook.add_stats(stats)
        return stats

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        self.scheduler.check_integrity()
        queued = {r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._answers.requests), "the scheduler has other requests than the engine"
        self._in_flight.check_integrity(self._answers.requests.values())
