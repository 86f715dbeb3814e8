"""How many drafts are worth their costs: the marginal rule, what is counted, what is measured, and that ranks agree."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quintet.config import SpeculativeConfig
from quintet.engine.lora.manager import LoRARole
from quintet.engine.request import CoreRequest, Request
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.factory import make_step_costs
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.policy import COST_SIZES, LEAST_CHANCE, PLAIN_STEPS, PRIOR, PROBE_STEPS, DraftPolicy
from quintet.engine.spec_decode.step_costs import TABLE_STEPS, StepCosts
from quintet.engine.step_plan import StepPlan
from quintet.sampling_params import SamplingParams

FREE = [1.0] * len(COST_SIZES)  # a step of 512 tokens takes as long as one of 1
PER_TOKEN = [float(size) for size in COST_SIZES]


def request(number: int = 0) -> Request:
    return Request(CoreRequest(str(number), [1, 2, 3], SamplingParams(), (0, number), 100), number)


def numbers(room: Sequence[tuple[Request, int]]) -> list[int]:
    return [most for _, most in room]


def test_without_costs_there_are_as_many_as_fit() -> None:
    room = [(request(0), 3), (request(1), 0)]
    assert DraftPolicy(4).limit(room) == room


def test_free_drafts_are_all_given_and_dear_ones_are_not() -> None:
    policy, room = DraftPolicy(4), [(request(0), 3), (request(1), 4), (request(2), 0)]
    policy.set_costs(FREE)
    assert policy.limit(room) == room and not policy.skips_next
    policy.set_costs(PER_TOKEN)  # each token takes as long as the first: a draft would have to be certain
    assert numbers(policy.limit(room)) == [0, 0, 0] and policy.skips_next


def test_a_draft_that_gains_what_it_costs_is_none() -> None:
    policy, room = DraftPolicy(1), [(request(0), 1)]
    policy._all[:] = LEAST_CHANCE
    assert numbers(policy.limit(room)) == [0]
    policy._all[:] = 1.0
    policy.set_costs(PER_TOKEN)
    assert numbers(policy.limit(room)) == [0], "a second token takes as long as the first"


def test_a_proposer_that_takes_long_is_asked_for_fewer() -> None:
    policy, room = DraftPolicy(4), [(request(0), 4), (request(1), 4)]
    asked = []
    for seconds in (0.0, 0.2, 0.4, 1.0):
        policy.set_costs([*FREE, seconds])
        asked.append(sum(numbers(policy.limit(room))))
    assert asked == sorted(asked, reverse=True) and asked[0] == 8 > asked[1] > asked[-1] == 0


def test_the_proposer_is_measured_by_its_drafts() -> None:
    times, tables = iter([0.0, 0.6, 1.0, 1.0]), list[list[float]]()
    costs = StepCosts(tables.append, lambda: next(times))
    costs.time_drafts(lambda: 3)
    costs.time_drafts(lambda: 0)  # it had none: nothing is learned
    assert costs._draft_seconds == pytest.approx(0.2)


def test_the_marginal_rule_is_that_of_a_search_step_by_step() -> None:
    rng = random.Random(0)
    for _ in range(200):
        k, count = rng.randrange(1, 6), rng.randrange(1, 7)
        policy = DraftPolicy(k)
        requests = [request(number) for number in range(count)]
        for each in requests:
            for _ in range(rng.randrange(8)):
                drafted = rng.randrange(1, k + 1)
                policy.add_result(each, drafted, rng.randrange(drafted + 1))
        slope = rng.random() * 0.5
        costs = [1 + slope * size for size in COST_SIZES]
        policy.set_costs(costs)
        room = [(each, rng.randrange(k + 1)) for each in requests]
        chances = [np.cumprod(policy._rates.get(each, policy._all))[:most].tolist() for each, most in room]
        given, expected, tokens = [0] * count, float(count), count
        while True:
            left = [(chances[at][given[at]], -at) for at in range(count) if given[at] < len(chances[at])]
            if not left:
                break
            chance, at = max(left)
            now, more = (np.interp(size, COST_SIZES, costs) for size in (tokens, tokens + 1))
            if chance / expected <= (more - now) / now:
                break
            given[-at], expected, tokens = given[-at] + 1, expected + chance, tokens + 1
        assert numbers(policy.limit(room)) == given


def test_accepted_places_are_counted_up_to_the_first_rejected() -> None:
    policy, one = DraftPolicy(3), request()
    for _ in range(40):
        policy.add_result(one, 3, 1)  # the second is rejected, the third not seen
    rates = policy._rates[one]
    assert rates[0] > 0.99 and rates[1] < 0.01 and rates[2] == PRIOR
    assert PRIOR < policy._all[0] < rates[0]
    policy.set_costs([1 + 0.2 * size for size in COST_SIZES])
    assert numbers(policy.limit([(one, 3), (request(1), 3)])) == [1, 1]
    policy.finish(one)
    assert not policy._rates


def test_after_many_steps_without_drafts_one_has_some() -> None:
    policy, room = DraftPolicy(2), [(request(), 2)]
    policy.set_costs(PER_TOKEN)
    given = [numbers(policy.limit(room))[0] for _ in range(3 * PROBE_STEPS)]
    assert [place for place, count in enumerate(given) if count] == [
        PROBE_STEPS - 1,
        2 * PROBE_STEPS - 1,
        3 * PROBE_STEPS - 1,
    ]
    for _ in range(PROBE_STEPS - 1):  # steps that are planned ahead count, too
        policy.limit([(room[0][0], 0)] if policy.skips_next else room)
    assert not policy.skips_next or numbers(policy.limit(room)) == [1]  # a token more takes as long as a step


def test_costs_are_means_by_size_with_lines_between_them() -> None:
    ticks = itertools.count()
    now = [0.0]
    tables: list[list[float]] = []

    def clock() -> float:
        next(ticks)
        return now[0]

    costs = StepCosts(tables.append, clock)

    def step(tokens: int, seconds: float, fails: bool = False) -> None:
        plan = StepPlan(tokens={request(): tokens}, num_tokens=tokens)
        costs.before_launch(plan, lambda *args: None)
        now[0] += seconds
        if not fails:
            costs.after_step(plan)

    costs.before_launch(StepPlan(), lambda *args: None)  # an empty plan is not started
    assert costs.table() is None
    for number in range(TABLE_STEPS):
        step(1, 2.0) if number % 2 else step(8, 9.0)
        step(700, 80.0, fails=True)
    (table,) = tables
    assert table[COST_SIZES.index(1)] == pytest.approx(2) and table[COST_SIZES.index(8)] == pytest.approx(9)
    assert table[COST_SIZES.index(4)] == pytest.approx(2 + 3 * 7 / 7) and table[len(COST_SIZES) - 1] == pytest.approx(9)
    assert table[len(COST_SIZES) :] == [0]  # no drafts were made
    step(1, 1000.0)  # an outlier counts as four times the mean
    assert (costs.table() or [])[0] < 3
    costs.start_over()
    step(1, 2.0)


def test_steps_that_overlap_are_counted_once() -> None:
    now = [0.0]
    costs = StepCosts(lambda table: None, lambda: now[0])
    plans = [StepPlan(tokens={request(): 1}, num_tokens=1) for _ in range(3)]
    costs.before_launch(plans[0], lambda *args: None)
    for plan, following in zip(plans, plans[1:], strict=False):
        costs.before_launch(following, lambda *args: None)
        now[0] += 5
        costs.after_step(plan)
    assert (costs.table() or [])[0] == 5


def drafting(adapts: bool) -> Drafting:
    config = SpeculativeConfig("ngram", 2)
    return Drafting(NgramProposer(config), 9, policy=DraftPolicy(2) if adapts else None)


def test_one_rank_measures_for_all() -> None:
    """What it measures counts from the step on that all ranks hear of it; alone, at once."""
    roles: dict[Any, bool] = {role: make_step_costs(drafting(True), role) is not None for role in LoRARole}
    assert roles[LoRARole.ALONE] and roles[LoRARole.LEADS] and sum(roles.values()) == 2
    assert make_step_costs(drafting(False), LoRARole.ALONE) is make_step_costs(None, LoRARole.ALONE) is None
    one, other = drafting(True), drafting(True)
    one.hold_costs(PER_TOKEN)
    room = [(request(), 2)]
    assert one._policy is not None and numbers(one._policy.limit(room)) == [2]
    sent = one.take_costs()
    other.set_costs(sent)
    assert sent == PER_TOKEN and one.take_costs() == []
    for each in (one, other):
        assert each._policy is not None and numbers(each._policy.limit(room)) == [0]


def test_wrong_drafts_end_before_costs_are_known() -> None:
    policy, room = DraftPolicy(4), [(request(), 4) for _ in range(16)]
    steps = 0
    while any(given := numbers(policy.limit(room))):
        steps += 1
        for (each, _), drafted in zip(room, given, strict=True):
            if drafted:
                policy.add_result(each, drafted, 0)
    assert 0 < steps < 12
    assert sum(numbers(policy.limit([(request(), 4)]))) < 4, "the next request begins with what was learned"


def test_probes_cost_little_where_tokens_are_dear() -> None:
    policy, room = DraftPolicy(4), [(request(), 4) for _ in range(16)]
    policy.set_costs(PER_TOKEN)
    given = [sum(numbers(policy.limit(room))) for _ in range(4 * PROBE_STEPS)]
    assert max(given) > 0
    extra = sum(np.interp(16 + count, COST_SIZES, PER_TOKEN) - np.interp(16, COST_SIZES, PER_TOKEN) for count in given)
    assert extra <= 0.01 * len(given) * np.interp(16, COST_SIZES, PER_TOKEN)


def test_now_and_then_a_step_has_none_so_that_its_time_is_known() -> None:
    """Else steps without drafts would be thought to take as long as the smallest with drafts."""
    policy, room = DraftPolicy(2), [(request(0), 2)]
    for costs in (None, FREE):
        if costs is not None:
            policy.set_costs(costs)
        given = [numbers(policy.limit(room))[0] for _ in range(2 * PLAIN_STEPS + 2)]
        assert given == ([2] * PLAIN_STEPS + [0]) * 2 and not policy.skips_next
