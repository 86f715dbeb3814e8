"""The steps that run: started one after the other, and landed in the same order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from quintet.engine.request import Request
from quintet.engine.runner import Runner, StepResult
from quintet.engine.scheduler import Plan


def _raise(error: Exception) -> NoReturn:
    raise error


@dataclass
class Flight:
    """A step that was started: waiting for it gives its result, or raises what went wrong."""

    plan: Plan
    wait: Callable[[], StepResult] = partial(_raise, RuntimeError("the step was not started"))


class Flights:
    """One runner's. Whoever starts a step takes what lands; nothing here changes a request."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._running: list[Flight] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def plans(self) -> list[Plan]:
        """Of the steps that run, in order."""
        return [flight.plan for flight in self._running]

    def launch(self, plan: Plan) -> bool:
        """Whether the step could be started; if not, its error lands after the steps before it."""
        flight = Flight(plan)
        self._running.append(flight)
        try:
            flight.wait = self._runner.launch(plan)
        except Exception as error:
            flight.wait = partial(_raise, error)
            return False
        return True

    def land(self, keep: int = 0) -> Iterator[tuple[Plan, StepResult | Exception]]:
        """Waits for the steps that run, but for the last `keep`, and gives each with its result or what went wrong."""
        while len(self._running) > keep:
            flight = self._running[0]
            try:
                result: StepResult | Exception = flight.wait()
            except Exception as error:
                result = error
            del self._running[0]
            yield flight.plan, result

    def forget(self, request: Request) -> None:
        """It has ended: its rows run on, and what they give is dropped."""
        for flight in self._running:
            flight.plan.tokens.pop(request, None)

    def clear(self) -> None:
        """What runs is not waited for, and its results are dropped."""
        self._running.clear()
