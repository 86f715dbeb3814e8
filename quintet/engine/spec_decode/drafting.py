"""Driver of a proposer: asks it for drafts before each step, checks them, and turns it off if it fails repeatedly."""

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from quintet.engine.request import Request
from quintet.engine.spec_decode.proposer import Proposer
from quintet.interface.platform import CacheLost, DeviceLost

logger = logging.getLogger(__name__)

T = TypeVar("T")
DraftRoom = Sequence[tuple[Request, int]]  # requests that decode, and the most drafts of each; 0: none

MAX_FAILURES = 3  # steps in a row in which the proposer fails before it is turned off


class Drafting:
    """A proposer with guards: what it does wrong costs drafts, and never a request."""

    def __init__(self, proposer: Proposer, vocab_size: int, max_requests: int | None = None) -> None:
        """max_requests: steps that decode more requests have no drafts (`disable_by_batch_size`)."""
        self._proposer, self._vocab_size, self._max_requests = proposer, vocab_size, max_requests
        self.num_drafts: Final = proposer.num_drafts
        self.disabled_reason = ""  # why the proposer is turned off; empty: it is on
        self._num_failures = 0  # steps in a row
        self._has_failed = False  # since the last step
        self._has_logged = False

    def propose(self, room: DraftRoom) -> None:
        """Fills `draft_tokens` of the requests that may have drafts, and clears that of the others in `room`. A step
        that decodes as many requests as `room` has follows. Raises DeviceLost and CacheLost alone."""
        for request, _ in room:
            if request.draft_tokens:
                request.draft_tokens = []
        if self.disabled_reason:
            return
        wanted = [(request, most) for request, most in room if most > 0] if self._is_enabled_for(len(room)) else []
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
        decoding = [r for r in running if r.num_computed >= r.num_known and r.tokens_left > 1]
        return bool(decoding) and self._guarded(lambda: self._proposer.may_propose(decoding), False)

    def finish(self, request: Request) -> None:
        """Reports to the proposer that a request has ended."""
        if not self.disabled_reason:
            self._guarded(lambda: self._proposer.finish(request), None)

    def start_over(self) -> None:
        """Reports to the proposer that all requests are computed again."""
        if not self.disabled_reason:
            self._guarded(self._proposer.start_over, None)

    def _is_enabled_for(self, requests: int) -> bool:
        return self._max_requests is None or requests <= self._max_requests

    def _propose(self, wanted: DraftRoom) -> None:
        self._proposer.propose(wanted)
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
