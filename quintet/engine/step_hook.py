"""Step hooks: optional parts of an engine that act before and after its steps, such as a KV connector."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.engine.observability.stats import Stats

if TYPE_CHECKING:  # the scheduler knows the KV connector, which is a hook
    from quintet.engine.request import Request
    from quintet.engine.scheduler import Scheduler
    from quintet.engine.step_plan import StepPlan
    from quintet.model_loader.weight_files import WeightFiles

Fail = Callable[["Request", str], None]  # ends a request with an error


class StepHook:
    """Base of step hooks. The engine calls each method on all its hooks, in their order; by default they do nothing."""

    @property
    def waits_for_steps(self) -> bool:
        """True if before_step() has work that needs all started steps to be finished."""
        return False

    def before_step(self, fail: Fail) -> None:
        """Called before a step is planned."""

    def before_launch(self, plan: "StepPlan", fail: Fail) -> None:
        """Called when a step is planned, and before its model is started; an empty plan is not started. `fail` takes a
        request out of the plan, too."""

    def after_step(self, plan: "StepPlan") -> None:
        """Called when a step has finished, and its tokens are appended. Failed steps are left out."""

    def after_compute(self, scheduler: "Scheduler", running: bool) -> None:
        """Called at the end of Engine.compute(), in reverse order. running: it has started a step, or one runs."""

    def start_over(self) -> None:
        """Called when nothing that started steps have written counts any more: all requests are computed again."""

    def reset_prefix_cache(self) -> None:
        """Called when the prefix cache was emptied."""

    def reload_weights(self, weights: "WeightFiles | Path | None") -> None:
        """Called when the weights were replaced, before the prefix cache is emptied."""

    def add_stats(self, stats: Stats) -> Stats:
        """Returns the engine's stats with those of this part."""
        return stats

    def close(self) -> None:
        """Ends threads, and what they write."""
