"""The steps that run: started one after the other, drawn and landed in the same order."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from quintet.engine.executor.model_runner import Forward, StepResult, StepRunner
from quintet.engine.request import Request
from quintet.engine.step_plan import StepPlan


def _raise(error: Exception) -> NoReturn:
    raise error


@dataclass
class InFlightStep:
    """A step that was started; once it is drawn, waiting for it gives its result, or raises what went wrong."""

    plan: StepPlan
    forward: Forward | None = None
    wait: Callable[[], StepResult] | None = None


class InFlightSteps:
    """Running steps of one runner. The caller that starts them collects the results; nothing here changes a request."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner, self._spans = runner, runner.spans
        self._running: list[InFlightStep] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def plans(self) -> list[StepPlan]:
        """Plans of the steps that run, in order."""
        return [flight.plan for flight in self._running]

    def start(self, plan: StepPlan) -> bool:
        """Starts the step's model; False if that failed: its error lands after the steps before it."""
        flight = InFlightStep(plan)
        self._running.append(flight)
        try:
            flight.forward = self._runner.forward(plan)
        except Exception as error:
            flight.wait = partial(_raise, error)
        return flight.forward is not None

    @property
    def needs_previous_tokens(self) -> bool:
        """True if the last step can be drawn only when those before it have landed."""
        forward = self._running[-1].forward
        return len(self) > 1 and forward is not None and self._runner.needs_previous_tokens(forward)

    @property
    def failed(self) -> Collection[Request]:
        """Requests that the last step could draw nothing for."""
        forward = self._running[-1].forward
        return forward.failed if forward is not None else ()

    def sample(self) -> bool:
        """Draws the last step; False if that failed, or if a step before it has failed."""
        flight = self._running[-1] if self._running else None
        if flight is None or flight.forward is None:
            return False
        try:
            flight.wait = self._runner.sample(flight.forward)
        except Exception as error:
            flight.wait = partial(_raise, error)
            return False
        if self._spans.events is not None:
            self._spans.lap("sample", flight.plan)
        return True

    def collect(self, keep: int = 0) -> Iterator[tuple[StepPlan, StepResult | Exception]]:
        """Waits for the steps that run, but for the last `keep`, and gives each with its result or what went wrong."""
        while len(self._running) > keep:
            flight = self._running[0]
            assert flight.wait is not None, "a step lands before it is drawn"
            try:
                result: StepResult | Exception = flight.wait()
            except Exception as error:
                result = error
            result = self._runner.agree(flight.plan, result)
            if self._spans.events is not None:
                self._spans.lap("wait", flight.plan)
            del self._running[0]
            yield flight.plan, result

    def drop(self, request: Request) -> None:
        """Drops the results of a request that has ended; its rows run on."""
        for flight in self._running:
            flight.plan.tokens.pop(request, None)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that requests wait for tokens of these steps alone."""
        for request in requests:
            assert self._running or request.num_computed < request.num_known, f"{request} has no token left to compute"
            running = sum(request in plan.tokens for plan in self.plans)
            expected = request.num_unknown - request.num_drafts
            assert expected <= running, f"{request} expects tokens of steps that do not run"

    def clear(self) -> None:
        """Drops the running steps and their results, without waiting for them."""
        self._running.clear()
