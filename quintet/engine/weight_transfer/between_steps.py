"""Effects of pauses and of updates of weights on the requests of an engine, between two steps."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quintet.engine.request import FinishReason
from quintet.engine.scheduler import Scheduler
from quintet.engine.step_hook import StepHook
from quintet.engine.step_output import StepOutputProcessor
from quintet.outputs import TokenDelta


class EngineCalls(NamedTuple):
    """Calls of an engine that only its parts may make."""

    collect: Callable[[], None]  # the results of the steps that run
    start_over: Callable[[], None]  # has all requests computed again
    reset_prefix_cache: Callable[[], None]
    emit: Callable[[TokenDelta], None]  # adds a delta to those of the last step
    check_weights: Callable[[], None]  # ValueError while they sleep


@dataclass(frozen=True)
class BetweenSteps:
    """Requests of an engine, for its controls."""

    scheduler: Scheduler
    answers: StepOutputProcessor
    hooks: Sequence[StepHook]
    calls: EngineCalls

    def check_weights(self) -> None:
        self.calls.check_weights()

    def finish_steps(self) -> None:
        self.calls.collect()

    def end_requests(self, request_ids: Sequence[str] | None) -> int:
        """Ends requests, or all (None), whose last deltas say so -> their number."""
        running = self.answers.requests
        ended = (
            list(running.values())
            if request_ids is None
            else [running[each] for each in request_ids if each in running]
        )
        for request in ended:
            self.calls.emit(self.answers.end(request, FinishReason.ABORT))
        return len(ended)

    def weights_changed(self, keep_kv: bool) -> None:
        """Forgets what was computed with other weights. With `keep_kv` running requests keep their pages, which no
        other request finds."""
        for hook in self.hooks:
            hook.reload_weights(None)
        self.calls.reset_prefix_cache()
        if not keep_kv:
            self.calls.start_over()

    def recompute(self) -> None:
        """Has running requests computed again, with an empty prefix cache."""
        self.calls.collect()
        self.calls.reset_prefix_cache()
        self.calls.start_over()

    def clear_cache(self) -> None:
        self.calls.reset_prefix_cache()

    def stop_admitting(self, stopped: bool) -> None:
        """Starts no request that comes from now on, until called with False."""
        orders = [request.order for request in self.answers.requests.values()]
        self.scheduler.last_order = max(orders, default=-1) if stopped else sys.maxsize

    def has_admitted(self) -> bool:
        """True if requests are there that came before."""
        return any(request.order <= self.scheduler.last_order for request in self.answers.requests.values())
