"""Driver of a proposer: asks it for drafts before each step, checks them, and turns it off if it fails repeatedly."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from quintet.engine.request import Request
from quintet.engine.spec_decode.policy import DraftPolicy
from quintet.engine.spec_decode.proposer import Proposer
from quintet.engine.spec_decode.step_costs import StepCosts
from quintet.interface.platform import CacheLost, DeviceLost

logger = logging.getLogger(__name__)

T = TypeVar("T")
DraftRoom = Sequence[tuple[Request, int]]  # requests that decode, and the most drafts of each; 0: none

MAX_FAILURES = 3  # steps in a row in which the proposer fails before it is turned off


class Drafting:
    """A proposer with guards: what it does wrong costs drafts, and never a request."""

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        max_requests: int | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        """max_requests: steps that decode more requests have no drafts (`disable_by_batch_size`). Without a policy,
        there are as many drafts as fit."""
        self._policy, self._new_costs = policy, list[float]()
        self._proposer, self._vocab_size, self._max_requests = proposer, vocab_size, max_requests
        self.num_drafts: Final = proposer.num_drafts
        self.step_costs: StepCosts | None = None  # measures the proposer, where this rank measures
        self.disabled_reason = ""  # why the proposer is turned off; empty: it is on
        self._num_failures = 0  # steps in a row
        self._has_failed = False  # since the last step
        self._has_logged = False

    @property
    def adapts(self) -> bool:
        """True if the number of drafts depends on what they cost."""
        return self._policy is not None

    def propose(self, room: DraftRoom) -> None:
        """Fills `draft_tokens` of the requests that may have drafts, and clears that of the others in `room`. A step
        that decodes as many requests as `room` has follows. Raises DeviceLost and CacheLost alone."""
        for request, _ in room:
            if request.draft_tokens:
                request.draft_tokens = []
        if self.disabled_reason:
            return
        allowed = room if self._is_enabled_for(len(room)) else ()
        if self._policy is not None:
            allowed = self._policy.limit(allowed)
        wanted = [(request, most) for request, most in allowed if most > 0]
        if wanted or getattr(self._proposer, "reads_each_step", False):
            self._guarded(lambda: self._propose(wanted), None)
            if self._has_failed:
                for request, _ in wanted:
                    request.draft_tokens = []
        self._count_failures()

    def may_propose(self, running: Sequence[Request]) -> bool:
        """Returns whether a running request may have drafts, once the running step has finished."""
        if self.disabled_reason or not self._is_enabled_for(len(running)):
            return False
        if self._policy is not None and self._policy.skips_next:
            return False
        decoding = [r for r in running if r.num_computed >= r.num_known and r.tokens_left > 1]
        return bool(decoding) and self._guarded(lambda: self._proposer.may_propose(decoding), False)

    def finish(self, request: Request) -> None:
        """Reports to the proposer that a request has ended."""
        if self._policy is not None:
            self._policy.finish(request)
        if not self.disabled_reason:
            self._guarded(lambda: self._proposer.finish(request), None)

    def start_over(self) -> None:
        """Reports to the proposer that all requests are computed again."""
        if not self.disabled_reason:
            self._guarded(self._proposer.start_over, None)

    def add_result(self, request: Request, drafted: int, accepted: int) -> None:
        """Counts a verified draft of a request that goes on."""
        if self._policy is not None:
            self._policy.add_result(request, drafted, accepted)

    def set_costs(self, costs: Sequence[float]) -> None:
        """Sets the measured seconds of steps, by their tokens; where ranks are processes, in the same step on each."""
        if self._policy is not None:
            self._policy.set_costs(costs)

    def hold_costs(self, costs: list[float]) -> None:
        """Holds measured costs until take_costs(): the other ranks are to get them, too."""
        self._new_costs = costs

    def take_costs(self) -> list[float]:
        """Sets and returns the costs that are held; empty if there are none."""
        costs, self._new_costs = self._new_costs, []
        if costs:
            self.set_costs(costs)
        return costs

    def _is_enabled_for(self, requests: int) -> bool:
        return self._max_requests is None or requests <= self._max_requests

    def _propose(self, wanted: DraftRoom) -> None:
        def propose() -> int:
            self._proposer.propose(wanted)
            return sum(len(request.draft_tokens) for request, _ in wanted)

        if self.step_costs is None:
            propose()
        else:
            self.step_costs.time_drafts(propose)
        for request, most in wanted:
            if request.draft_tokens:
                self._trim(request, most)

    def _trim(self, request: Request, most: int) -> None:
        """Cuts drafts that are too many, from the first one on that is no token, or that its grammar forbids."""
        drafts, size = request.draft_tokens, self._vocab_size
        del drafts[most:]
        if min(drafts) < 0 or max(drafts) >= size:
            del drafts[next(place for place, token_id in enumerate(drafts) if not 0 <= token_id < size) :]
        if drafts and request.grammar is not None:
            del drafts[request.grammar.count_allowed(request, drafts) :]

    def _guarded(self, call: Callable[[], T], otherwise: T) -> T:
        """Returns what a call of the proposer returns, or `otherwise` if it fails."""
        try:
            return call()
        except (DeviceLost, CacheLost) as error:
            self._note(error)
            raise
        except Exception as error:
            self._note(error)
            return otherwise

    def _note(self, error: Exception) -> None:
        self._has_failed, self._last_error = True, f"{type(error).__name__}: {error}"
        if not self._has_logged:
            self._has_logged = True
            logger.warning("speculative decoding: a step has no drafts, its proposer failed", exc_info=error)

    def _count_failures(self) -> None:
        """Called once per step."""
        self._num_failures = self._num_failures + 1 if self._has_failed else 0
        self._has_failed = False
        if self._num_failures >= MAX_FAILURES:
            self.disabled_reason = f"the proposer failed in {MAX_FAILURES} steps in a row: {self._last_error}"
            logger.error("speculative decoding is turned off, requests go on without: %s", self.disabled_reason)
