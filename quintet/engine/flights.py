"""The steps that run: started one after the other, drawn and landed in the same order."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from quintet.engine.request import Request
from quintet.engine.runner import Forward, StepResult, Steps
from quintet.engine.scheduler import Plan


def _raise(error: Exception) -> NoReturn:
    raise error


@dataclass
class Flight:
    """A step that was started; once it is drawn, waiting for it gives its result, or raises what went wrong."""

    plan: Plan
    forward: Forward | None = None
    wait: Callable[[], StepResult] | None = None


class Flights:
    """One runner's. Whoever starts a step takes what lands; nothing here changes a request."""

    def __init__(self, runner: Steps) -> None:
        self._runner, self._spans = runner, runner.spans
        self._running: list[Flight] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def plans(self) -> list[Plan]:
        """Of the steps that run, in order."""
        return [flight.plan for flight in self._running]

    def start(self, plan: Plan) -> bool:
        """Whether the step's model could be started; if not, its error lands after the steps before it."""
        flight = Flight(plan)
        self._running.append(flight)
        try:
            flight.forward = self._runner.forward(plan)
        except Exception as error:
            flight.wait = partial(_raise, error)
        return flight.forward is not None

    @property
    def looks_back(self) -> bool:
        """Whether the last step can be drawn only when those before it have landed."""
        forward = self._running[-1].forward
        return len(self) > 1 and forward is not None and self._runner.looks_back(forward)

    @property
    def failed(self) -> Collection[Request]:
        """For whom the last step could draw nothing."""
        forward = self._running[-1].forward
        return forward.failed if forward is not None else ()

    def draw(self) -> bool:
        """Whether the last step could be drawn; it cannot if a step before it has failed."""
        flight = self._running[-1] if self._running else None
        if flight is None or flight.forward is None:
            return False
        try:
            flight.wait = self._runner.draw(flight.forward)
        except Exception as error:
            flight.wait = partial(_raise, error)
            return False
        if self._spans.events is not None:
            self._spans.lap("sample", flight.plan)
        return True

    def land(self, keep: int = 0) -> Iterator[tuple[Plan, StepResult | Exception]]:
        """Waits for the steps that run, but for the last `keep`, and gives each with its result or what went wrong."""
        while len(self._running) > keep:
            flight = self._running[0]
            assert flight.wait is not None, "a step lands before it is drawn"
            try:
                result: StepResult | Exception = flight.wait()
            except Exception as error:
                result = error
            if self._runner.agreed is not None:
                result = self._runner.agreed(flight.plan, result)
            if self._spans.events is not None:
                self._spans.lap("wait", flight.plan)
            del self._running[0]
            yield flight.plan, result

    def forget(self, request: Request) -> None:
        """It has ended: its rows run on, and what they give is dropped."""
        for flight in self._running:
            flight.plan.tokens.pop(request, None)

    def clear(self) -> None:
        """What runs is not waited for, and its results are dropped."""
        self._running.clear()
