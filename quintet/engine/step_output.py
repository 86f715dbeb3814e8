"""Applies finished steps to their requests: builds token deltas and ends requests that are done."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quintet.engine.executor.model_runner import StepResult
from quintet.engine.in_flight import InFlightSteps
from quintet.engine.observability.stats import STEP_BOUNDS, SpecDecodeStats, StepStats
from quintet.engine.request import FinishReason, Request
from quintet.engine.sampling.logits_edits import banned_tokens
from quintet.engine.scheduler import Scheduler
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.step_plan import StepPlan
from quintet.outputs import TokenDelta, TokenLogprobs

if TYPE_CHECKING:
    from quintet.engine.executor.routed_experts import RoutedExpertsStore
    from quintet.engine.pooling.heads import FloatRows

MAX_JUMP = 256  # tokens that a grammar alone may decide at once: the engine has others to serve
NOT_FINITE = "the model gave no finite logits for this request; its weights or dtype may be at fault"
REPETITION_DETECTED = "repetition_detected"  # vLLM's stop_reason
NO_TOKEN_LEFT = (
    "structured_outputs ended: no token is left to draw, of those that bad_words, allowed_token_ids or the like leave"
)
ALL_BANNED = (
    "no token is left to draw: bad_words ban all of allowed_token_ids after the text so far, or those left would end "
    "the text before min_tokens; allow another token"
)


class StepOutputProcessor:
    """The requests that have not ended, and what was counted since the engine's start."""

    def __init__(
        self,
        scheduler: Scheduler,
        flights: InFlightSteps,
        jumps: bool = True,
        drafting: Drafting | None = None,
        routed: "RoutedExpertsStore | None" = None,
    ) -> None:
        """jumps: whether tokens may be added without a draw, where a grammar leaves no other."""
        self._scheduler, self._in_flight, self._can_jump = scheduler, flights, jumps
        self._drafting, self._routed = drafting, routed
        self.requests: dict[str, Request] = {}
        self._num_steps = self._step_tokens = 0  # the latter of the last step
        self._num_computed = self._num_generated = 0  # tokens of prompts, and of outputs
        self._num_jumped = 0  # output tokens that no step drew: grammars left no other
        self._num_drafts = self._num_drafted = 0  # guesses at once, and tokens in them
        self._accepted_at = [0] * scheduler.max_num_drafts  # right ones, by their place in the guess
        self._step_sizes = [0] * (len(STEP_BOUNDS) + 1)  # steps by their tokens
        self._num_tokens = 0  # of all steps

    def step_stats(self) -> StepStats:
        """Returns the counts of steps and tokens."""
        tokens = self._num_tokens, self._num_computed, self._num_generated, self._num_jumped
        return StepStats(self._num_steps, self._step_tokens, *tokens, tuple(self._step_sizes))

    def spec_decode_stats(self) -> SpecDecodeStats:
        """Returns the counts of drafts."""
        accepted = tuple(self._accepted_at)
        reason = "" if self._drafting is None else self._drafting.disabled_reason
        return SpecDecodeStats(
            self._num_drafts, self._num_drafted, sum(accepted), accepted, num_disabled=int(bool(reason)),
            disabled_reason=reason,
        )  # fmt: skip

    def finish(self, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Counts what was computed, appends the sampled tokens, ends requests that are done."""
        self._num_computed += plan.num_prompt_tokens
        self._num_steps += 1
        self._step_tokens = plan.num_tokens
        self._num_tokens += plan.num_tokens
        self._step_sizes[bisect_left(STEP_BOUNDS, plan.num_tokens)] += 1
        deltas = [self.fail(request, why) for request, why in result.failed.items() if request in plan.tokens]
        for request, found in {**result.pooled, **result.prompt_logprobs}.items():
            if request in plan.tokens:  # one that was taken back has given nothing
                request.num_scored += len(found)
        deltas += [self._pool(request, found) for request, found in result.pooled.items() if request in plan.tokens]
        after = result.rows.after_drafts() if plan.num_drafts else {}
        for row, request in enumerate(result.rows.sample):
            if request not in plan.tokens:  # it was taken back while the step ran, or had ended before
                continue
            if request.num_drafts:
                deltas += self._verify(request, (row, *after.get(request, ())), result)
            else:
                deltas.append(self._append_row(request, row, result))
                if request.grammar is not None:
                    deltas += self._append_forced(request)
        if result.prompt_logprobs:
            drawn = {*result.failed, *result.rows.sample}
            for request, found in result.prompt_logprobs.items():
                if request not in drawn and request in plan.tokens:  # a chunk of a prompt: nothing was drawn yet
                    deltas.append(TokenDelta(request.request_id, [], prompt_logprobs=found))
        return deltas

    def _pool(self, request: Request, found: "FloatRows | str") -> TokenDelta:
        """Ends a pooling request with its numbers, or why it has none; of another, gives scores of its prompt."""
        if isinstance(found, str):
            return self.fail(request, found)
        if request.core_request.pooling is None:
            return TokenDelta(request.request_id, [], data=found.tobytes(), shape=found.shape)
        delta = self.end(request, FinishReason.STOP)
        delta.data, delta.shape = found.tobytes(), found.shape
        return delta

    def _verify(self, request: Request, rows: Sequence[int], result: StepResult) -> list[TokenDelta]:
        """Verifies the drafts of a request with its rows: returns a delta for each drawn token, up to the first that is
        not the draft in its place."""
        drafts, deltas = request.pop_drafts(), []
        for place, (row, draft) in enumerate(zip(rows, [*drafts, None], strict=False)):
            deltas.append(self._append_row(request, row, result))
            accepted = deltas[-1].token_ids == [draft]
            if accepted:
                self._accepted_at[place] += 1
            if self._is_grammar_done(request):
                deltas.append(self.end(request, FinishReason.STOP))
            if deltas[-1].finish_reason is not None or not accepted:
                break
        self._num_drafts, self._num_drafted = self._num_drafts + 1, self._num_drafted + len(drafts)
        if deltas[-1].finish_reason is None:
            if self._drafting is not None:
                self._drafting.add_result(request, len(drafts), len(deltas) - 1)
            request.drop_rejected()
            if self._scheduler.kv_cache_manager.state_slots is not None:
                self._scheduler.kv_cache_manager.state_slots.drop_rejected(request)
            deltas += self._append_forced(request)
        return deltas

    def _append_forced(self, request: Request) -> list[TokenDelta]:
        """Appends the tokens that its grammar alone decides, to compute them in one step; ends it where nothing may
        follow. If a step that is running has the request, that step draws its next token."""
        deltas: list[TokenDelta] = []
        most = 0 if any(request in plan.tokens for plan in self._in_flight.plans) else MAX_JUMP
        grammar = request.grammar
        while grammar is not None and len(deltas) < most and self._num_forced(request):
            deltas.append(self._say(request, grammar.forced_token()))
            self._num_jumped += 1
        if self._is_grammar_done(request):
            deltas.append(self.end(request, FinishReason.STOP))
        return deltas

    def _num_forced(self, request: Request) -> int:
        """Number of next tokens that its grammar leaves no choice about, if the request goes on. 0 where tokens have
        log-probabilities, which the model alone knows, or where something else may forbid them."""
        params = request.params
        if request.grammar is None or params.num_logprobs is not None or not self._can_jump:
            return 0
        if params.allowed_token_ids or request.core_request.bad_words_ids:
            return 0
        return request.grammar.num_forced if self.requests.get(request.request_id) is request else 0

    def will_append_forced(self) -> bool:
        """True if a request will get tokens without a draw, by its grammar, after the one that is being drawn."""
        return any(r.num_unknown and self._num_forced(r) > 1 for r in self._scheduler.running if r.grammar)

    def _is_grammar_done(self, request: Request) -> bool:
        """True if its grammar lets nothing more follow, and it has not ended by itself."""
        grammar = request.grammar
        return grammar is not None and grammar.complete and self.requests.get(request.request_id) is request

    def _append_row(self, request: Request, row: int, result: StepResult) -> TokenDelta:
        """The token that a row drew, and what was asked for beside it."""
        token_id, routed = result.token_ids[row], TokenDelta("", [])
        if self._routed is not None:  # before it may end, and its pages with it
            self._routed.add_to(routed, request, request.num_known)
        delta = self._say(request, token_id) if token_id >= 0 else self.fail(request, _no_token_reason(request))
        delta.routed_experts, delta.routed_shape = routed.routed_experts, routed.routed_shape
        if result.logprobs is not None and (wanted := request.params.num_logprobs) is not None and not delta.error:
            delta.logprobs = [_trim_logprobs(result.logprobs[row], wanted)]
        if result.prompt_logprobs and not delta.error:
            delta.prompt_logprobs = result.prompt_logprobs.get(request)
        return delta

    def _say(self, request: Request, token_id: int) -> TokenDelta:
        """The token is the next of its output."""
        self._num_generated += 1
        reason, grammar = request.append_sampled(token_id), request.grammar
        if grammar is not None:
            if why := grammar.advance(request):
                return self.fail(request, f"structured_outputs ended: {why}")
            if reason in (FinishReason.LENGTH, FinishReason.REPETITION) and grammar.complete:
                reason = None  # its grammar is complete: it ends with STOP
        if reason is None:
            return _delta(request, [token_id])
        asked = reason is FinishReason.STOP and token_id in (request.params.stop_token_ids or ())
        stop = REPETITION_DETECTED if reason is FinishReason.REPETITION else token_id if asked else None
        return self.end(request, reason, [token_id], stop)

    def end(
        self, request: Request, reason: FinishReason, token_ids: Sequence[int] = (), stop: int | str | None = None
    ) -> TokenDelta:
        lends = request.transfer_params is not None and reason not in (FinishReason.ABORT, FinishReason.ERROR)
        lent = self._scheduler.offer_pages(request) if lends else None
        self._scheduler.remove(request)
        self._in_flight.drop(request)
        request.drop_unknown()
        if self._drafting is not None:
            self._drafting.finish(request)
        del self.requests[request.request_id]
        if request.lora is not None:
            request.lora.users -= 1
        delta = _delta(request, list(token_ids))
        delta.finish_reason, delta.stop_reason, delta.kv_transfer_params = reason.value, stop, lent
        return delta

    def fail(self, request: Request, why: str) -> TokenDelta:
        """Ends one request because of a failure inside it."""
        delta = self.end(request, FinishReason.ERROR)
        delta.error = why
        return delta


def _no_token_reason(request: Request) -> str:
    """Why no token could be drawn."""
    if request.grammar is not None:
        return NO_TOKEN_LEFT
    allowed = request.params.allowed_token_ids
    return ALL_BANNED if allowed and banned_tokens(request).issuperset(allowed) else NOT_FINITE


def _delta(request: Request, token_ids: list[int]) -> TokenDelta:
    cached, preemptions, scheduled = request.num_cached, request.num_preemptions, request.scheduled_at
    return TokenDelta(
        request.core_request.request_id, token_ids, num_cached=cached, num_preemptions=preemptions, scheduled=scheduled
    )


def _trim_logprobs(logprobs: TokenLogprobs, wanted: int) -> TokenLogprobs:
    """The batch computes the largest number that a request asks for; each request gets its own number."""
    if wanted == -1:
        return logprobs
    return TokenLogprobs(logprobs.ids[: wanted + 1], logprobs.values[: wanted + 1], logprobs.rank)
