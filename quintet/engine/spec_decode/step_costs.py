"""Measures how long steps take, by their number of tokens."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quintet.engine.spec_decode.policy import COST_SIZES
from quintet.engine.step_hook import Fail, StepHook

if TYPE_CHECKING:
    from quintet.engine.step_plan import StepPlan

TABLE_STEPS = 256  # finished steps between two tables
WEIGHT = 0.1  # of the newest step in the mean of its size


class StepCosts(StepHook):
    """Means of the seconds of steps. Made by the rank that decides for all; others read no clock."""

    def __init__(self, publish: Callable[[list[float]], None], clock: Callable[[], float] = time.perf_counter) -> None:
        """publish: gets the seconds of steps of COST_SIZES tokens, and those of a draft, every TABLE_STEPS steps."""
        self._publish, self._clock = publish, clock
        self._seconds = np.full(len(COST_SIZES), np.nan)
        self._tokens = np.zeros(len(COST_SIZES))  # means of the steps that `seconds` are of
        self._started: deque[tuple[StepPlan, float]] = deque()
        self._finished = 0.0  # when the last step had finished
        self._num_steps = 0
        self._draft_seconds = 0.0  # mean of the proposer's, for a draft

    def time_drafts(self, propose: Callable[[], int]) -> None:
        """Calls a proposer, which returns the number of its drafts, and measures it."""
        start = self._clock()
        count = propose()
        if count:
            each = (self._clock() - start) / count
            self._draft_seconds += (WEIGHT if self._draft_seconds else 1) * (each - self._draft_seconds)

    def before_launch(self, plan: "StepPlan", fail: Fail) -> None:
        if plan:
            self._started.append((plan, self._clock()))

    def after_step(self, plan: "StepPlan") -> None:
        now = self._clock()
        while self._started:
            started, begin = self._started.popleft()
            if started is plan:  # those before it failed
                self._add(plan.num_tokens, now - max(begin, self._finished))
                break
        self._finished = now
        self._num_steps += 1
        if self._num_steps % TABLE_STEPS == 0 and (table := self.table()) is not None:
            self._publish([*table, self._draft_seconds])

    def start_over(self) -> None:
        self._started.clear()

    def _add(self, tokens: int, seconds: float) -> None:
        at = bisect_right(COST_SIZES, tokens) - 1
        if at < 0 or tokens > COST_SIZES[-1]:
            return
        if np.isnan(self._seconds[at]):
            self._seconds[at], self._tokens[at] = seconds, tokens
        else:
            seconds = min(seconds, 4 * self._seconds[at])  # an outlier: something else held the machine
            self._seconds[at] += WEIGHT * (seconds - self._seconds[at])
            self._tokens[at] += WEIGHT * (tokens - self._tokens[at])

    def table(self) -> list[float] | None:
        """Returns the seconds of steps of COST_SIZES tokens: means, lines between them, and beyond them the nearest."""
        known = ~np.isnan(self._seconds)
        if not known.any():
            return None
        seconds: list[float] = np.interp(COST_SIZES, self._tokens[known], self._seconds[known]).tolist()
        return seconds
