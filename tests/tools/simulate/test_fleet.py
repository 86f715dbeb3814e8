"""Engines in virtual time: cases worked out by hand, what holds of every trace, and the plans of a real engine."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.clients.request_traces import TraceEntry
from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.request import CoreRequest
from quintet_tools.simulate.cost_model import Costs, Shape
from quintet_tools.simulate.fleet import Fleet, Played, too_long
from quintet_tools.simulate.timed_runner import TimedSteps
from tests.helpers.platforms.null_engine import null_client

SHAPE = Shape(64, 100)
EVEN = Costs(SHAPE, ((1, 1.0),))  # a step takes a second, whatever is in it


def played(entries: list[TraceEntry], costs: Costs = EVEN, engines: int = 1, **more: Any) -> Played:
    shape = {name: getattr(costs.shape, name) for name in ("max_model_len", "num_pages", "page_size", "max_num_seqs")}
    shape["max_num_batched_tokens"] = costs.shape.max_num_batched_tokens
    config = EngineConfig.from_kwargs(**shape, data_parallel_size=engines, **more)
    return Fleet(config, costs).play(entries)


def times(found: Played) -> list[list[float]]:
    return [list(each.times) for each in found.told]


def test_a_request_has_a_token_a_step_from_its_arrival_on() -> None:
    found = played([TraceEntry(0.5, 4, 3)])
    assert times(found) == [[1.5, 2.5, 3.5]]
    assert (found.seconds, list(found.worked), found.told[0].scheduled) == (3.0, [3.0], 0.5)


def test_who_comes_in_the_midst_of_a_step_is_in_the_next() -> None:
    found = played([TraceEntry(0.0, 4, 3), TraceEntry(0.25, 4, 2)])
    assert times(found) == [[1.0, 2.0, 3.0], [2.0, 3.0]]
    assert found.told[1].scheduled == 1.0


def test_an_idle_engine_waits_for_who_comes() -> None:
    found = played([TraceEntry(0.0, 1, 1), TraceEntry(10.0, 1, 1)])
    assert times(found) == [[1.0], [11.0]] and list(found.worked) == [2.0]


def test_tokens_rows_and_what_is_looked_back_on_cost() -> None:
    """A prompt of 4: 4 tokens, a row, 1 + 2 + 3 + 4 pairs. Then a token that looks back on 5."""
    costs = Costs(SHAPE, ((1, 1.0), (2, 2.0)), 100.0, 10_000.0, 1_000_000.0)
    first = 4 + 100 + 10 * 1_000_000
    assert times(played([TraceEntry(0.0, 4, 2)], costs)) == [[first, first + 1 + 100 + 5 * 10_000]]


def test_a_prompt_that_is_longer_than_a_step_takes_several() -> None:
    costs = replace(EVEN, shape=replace(SHAPE, max_num_batched_tokens=8))
    assert times(played([TraceEntry(0.0, 20, 2)], costs)) == [[3.0, 4.0]]


def test_two_engines_take_one_each_and_share_their_machine() -> None:
    both = [TraceEntry(0.0, 4, 2), TraceEntry(0.0, 4, 2)]
    found = played(both, engines=2)
    assert times(found) == [[1.0, 2.0]] * 2 and {each.engine for each in found.told} == {0, 1}
    found = played(both, replace(EVEN, sharing=(1.0, 3.0)), engines=2)
    assert times(found) == [[3.0, 6.0]] * 2
    found = played(both, replace(EVEN, sharing=(1.0, 3.0)), engines=1)
    assert times(found) == [[1.0, 2.0]] * 2


def test_the_way_to_the_engine_and_back_is_waited_for_once() -> None:
    found = played([TraceEntry(0.0, 4, 3), TraceEntry(0.75, 4, 1)], replace(EVEN, latency=0.5))
    assert times(found) == [[1.5, 2.5, 3.5], [2.5]] and found.told[0].scheduled == 0.5


def test_steps_of_the_same_work_differ_and_take_on_the_average_what_they_cost() -> None:
    spread = (0.5, 1.0, 1.5)
    shape = replace(SHAPE, max_model_len=4096, num_pages=400)
    (first,) = times(played([TraceEntry(0.0, 1, 3000)], replace(EVEN, shape=shape, spread=spread)))
    took = [later - at for at, later in zip([0.0, *first], first, strict=False)]
    assert {round(each, 6) for each in took} == set(spread)
    assert sum(took) / len(took) == pytest.approx(1, abs=0.05)


def test_a_step_that_is_planned_behind_another_loses_no_time() -> None:
    found = played([TraceEntry(0.5, 4, 3)], replace(EVEN, shape=replace(SHAPE, overlap=True)))
    assert times(found) == [[1.5, 2.5, 3.5]] and list(found.worked) == [3.0]


def test_a_beginning_is_computed_once() -> None:
    entries = [TraceEntry(float(10 * number), 48, 1, group=0, shared_length=32) for number in range(4)]
    found = played(entries)
    assert [each.cached for each in found.told] == [0, 32, 32, 32]
    assert found.stats[0].scheduler.prefix_hits == 96
    found = played(entries, enable_prefix_caching=False)
    assert [each.cached for each in found.told] == [0, 0, 0, 0]


def test_pages_that_are_short_preempt() -> None:
    costs = replace(EVEN, shape=Shape(64, 5, max_num_seqs=4))  # 4 pages of 16 tokens
    found = played([TraceEntry(0.0, 30, 30), TraceEntry(0.0, 30, 30)], costs)
    assert sum(each.preemptions for each in found.told) > 0
    assert [len(each.times) for each in found.told] == [30, 30]


def test_the_lower_priority_number_goes_first() -> None:
    costs = replace(EVEN, shape=replace(SHAPE, max_num_seqs=1))
    entries = [TraceEntry(0.0, 4, 2), TraceEntry(0.1, 4, 1, priority=5), TraceEntry(0.2, 4, 1, priority=1)]
    assert times(played(entries, costs, scheduling_policy="priority"))[1:] == [[4.0], [3.0]]
    assert times(played(entries, costs))[1:] == [[3.0], [4.0]]


def test_who_does_not_fit_is_told_apart() -> None:
    assert list(too_long([TraceEntry(0, 60, 4), TraceEntry(0, 60, 5), TraceEntry(0, 1, 64)], 64)) == [1, 2]


ENTRIES = st.lists(
    st.builds(
        lambda at, own, output, group: TraceEntry(
            at / 4, own + 16 * (group is not None), output, group=group, shared_length=16 if group is not None else 0
        ),
        st.integers(0, 40), st.integers(1, 30), st.integers(1, 16), st.none() | st.integers(0, 2),
    ),
    min_size=1, max_size=14,
)  # fmt: skip
SHAPES = st.builds(
    lambda pages, seqs, tokens, overlap: Shape(64, pages, 16, seqs, tokens, overlap=overlap),
    st.integers(5, 30), st.integers(1, 5), st.integers(5, 40), st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ENTRIES, SHAPES, st.integers(1, 3))
def test_everybody_is_answered_once_and_time_only_passes(entries: list[TraceEntry], shape: Shape, engines: int) -> None:
    costs = Costs(shape, ((1, 0.5), (8, 1.0), (40, 3.0)), 0.01, 0.001, 0.0001, (1.0, 1.25))
    found = played(entries, costs, engines)
    for told, entry in zip(found.told, entries, strict=True):
        assert len(told.times) == entry.output_length
        assert entry.arrival <= told.scheduled < told.times[0] and list(told.times) == sorted(told.times)
        assert told.times[0] - told.scheduled >= 0.5  # no step is shorter
    assert sum(each.steps.num_generation_tokens for each in found.stats) == sum(each.output_length for each in entries)
    computed = sum(each.steps.num_prompt_tokens + each.scheduler.prefix_hits for each in found.stats)
    assert computed >= sum(each.input_length for each in entries)  # more where some was computed again
    assert max(found.worked) <= found.seconds + 1e-9
    again = played(entries, costs, engines)
    assert times(again) == times(found) and list(again.worked) == list(found.worked)


@settings(max_examples=30, deadline=None)
@given(ENTRIES, SHAPES)
def test_an_engine_with_something_to_do_does_not_idle(entries: list[TraceEntry], shape: Shape) -> None:
    found = played([replace(each, arrival=0.0) for each in entries], Costs(replace(shape, overlap=False), ((1, 0.25),)))
    assert found.seconds == pytest.approx(found.worked[0])


def test_plans_are_those_of_a_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests between the same steps give the same plans, with chunks, shared beginnings and preemptions."""
    log: list[tuple[str, Any]] = []
    add, forward = Engine.add, TimedSteps.forward

    def noted_add(engine: Engine, admitted: CoreRequest) -> None:
        log.append(("add", admitted))
        add(engine, admitted)

    def noted_forward(steps: TimedSteps, plan: Any) -> Any:
        log.append(("plan", {each.request_id: count for each, count in plan.tokens.items()}))
        return forward(steps, plan)

    shape = Shape(96, 14, 16, 4, 24)
    entries = [
        TraceEntry(number * 0.9, 20 + 7 * (number % 5), 10 + 9 * (number % 3), group=number % 2, shared_length=16)
        for number in range(24)
    ]
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "add", noted_add)
        patched.setattr(TimedSteps, "forward", noted_forward)
        found = played(entries, Costs(shape, ((1, 0.5), (24, 1.5))))
    assert sum(each.preemptions for each in found.told) > 0 and found.stats[0].scheduler.prefix_hits > 0
    engine = null_client(max_model_len=96, num_pages=14, max_num_seqs=4, max_num_batched_tokens=24).engine
    schedule, plans = engine.scheduler.schedule, list[Any]()

    def noted_schedule() -> Any:
        plans.append(schedule())
        plans[-1] = (plan := plans[-1]) and {each.request_id: count for each, count in plan.tokens.items()}
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", noted_schedule)
    for number, (what, said) in enumerate(log):
        if what == "add":
            engine.add(said)
        else:
            engine.step()
            assert plans[-1] == said, f"entry {number} of the log"
    assert not engine.busy and len(plans) == found.stats[0].steps.num_steps
