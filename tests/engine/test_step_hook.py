"""Hooks are called around every step, in order, and may end requests or wait for steps that run."""

from dataclasses import dataclass, field
from typing import Any

from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.observability.stats import ExpertStats, Stats
from quintet.engine.request import Request
from quintet.engine.scheduler import Scheduler
from quintet.engine.step_hook import Fail, StepHook
from quintet.engine.step_plan import StepPlan
from tests.engine.test_overlap import Ask, Served, plain


@dataclass(eq=False)
class Noting(StepHook):
    """Notes its calls, with its name."""

    name: str = ""
    calls: list[str] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    waits: bool = False
    fails: Request | None = None

    def note(self, call: str) -> None:
        self.calls.append(f"{call} {self.name}".strip())

    @property
    def waits_for_steps(self) -> bool:
        return self.waits

    def before_step(self, fail: Fail) -> None:
        self.note("before")
        if self.fails is not None:
            fail(self.fails, "a hook ended it")
            self.fails = None

    def before_launch(self, plan: StepPlan, fail: Fail) -> None:
        self.note("launch")
        self.plans.append(plan)

    def after_step(self, plan: StepPlan) -> None:
        self.note("after")
        assert plan is self.plans[self.calls.count(f"after {self.name}".strip()) - 1], "steps end in order"

    def after_compute(self, scheduler: Scheduler, running: bool) -> None:
        self.note("end")

    def start_over(self) -> None:
        self.note("start over")

    def reset_prefix_cache(self) -> None:
        self.note("reset")

    def reload_weights(self, weights: Any) -> None:
        self.note(f"weights {weights}")

    def add_stats(self, stats: Stats) -> Stats:
        return Stats(experts=ExpertStats(experts_moved=stats.experts.experts_moved + 1))

    def close(self) -> None:
        self.note("close")


def engine_with(served: Served, *hooks: StepHook) -> Engine:
    engine = Engine(EngineParts(served.engine.scheduler, served.engine._runner, overlap=True, hooks=hooks))
    engine.add(Ask("a", [1, 2, 3], plain(3)).admitted())
    return engine


def test_hooks_are_called_around_each_step() -> None:
    hook = Noting()
    engine = engine_with(Served(), hook)
    engine.step()
    assert hook.calls == ["before", "launch", "end"], "the step still runs"
    hook.calls.clear()
    hook.plans = hook.plans[:1]
    engine.step()
    assert hook.calls == ["before", "launch", "after", "end"]
    while engine.busy:
        engine.step()
    assert hook.calls.count("after") == sum(bool(plan) for plan in hook.plans) == 3


def test_several_are_called_in_order_and_backwards_at_the_end() -> None:
    calls: list[str] = []
    hooks = [Noting(name, calls) for name in ("a", "b")]
    engine_with(Served(), *hooks).step()
    assert calls == ["before a", "before b", "launch a", "launch b", "end b", "end a"]


def test_no_step_runs_before_a_hook_that_waits() -> None:
    hook = Noting()
    engine = engine_with(Served(), hook)
    engine.step()
    hook.waits = True
    hook.calls.clear()
    engine.step()
    assert hook.calls[:2] == ["after", "before"]


def test_a_hook_may_end_a_request() -> None:
    hook = Noting()
    engine = engine_with(Served(), hook)
    hook.fails = engine.scheduler.waiting[0]
    (delta,) = engine.step()
    assert (delta.request_id, delta.error) == ("a", "a hook ended it") and not engine.busy


def test_a_failed_step_is_left_out_and_all_starts_over() -> None:
    served, hook = Served(), Noting()
    engine = engine_with(served, hook)
    served.work.fails.append(("run", 0, RuntimeError("on fire")))
    while engine.busy:
        engine.step()
    assert "start over" in hook.calls and "after" not in hook.calls


def test_other_calls_reach_hooks() -> None:
    hook = Noting()
    engine = engine_with(Served(), hook)
    engine.abort(["a"])
    engine.reload_weights(None)
    assert hook.calls == ["weights None", "reset", "start over"]
    assert engine.stats().experts.experts_moved == 1
    engine.close()
    assert hook.calls[-1] == "close"


def test_a_hook_that_does_nothing_changes_nothing() -> None:
    alone, ask = Served(), Ask("a", [1, 2, 3], plain(3))
    wanted, engine = alone.run(ask), engine_with(Served(), StepHook())
    tokens = [token for _ in range(5) for delta in engine.step() for token in delta.token_ids]
    assert tokens == wanted["a"].tokens and engine.stats().experts == ExpertStats()
