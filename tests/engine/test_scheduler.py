"""The scheduler as plain data: no device, no model; a test plays the runner."""

from collections.abc import Sequence
from typing import Any

import pytest

from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.request import PLACEHOLDER, CoreRequest, Request
from quintet.engine.scheduler import Scheduler
from quintet.engine.step_plan import SchedulerLimits, StepPlan
from quintet.sampling_params import SamplingParams

SIZE = 4


FULL = (KVCacheGroup(),)


def scheduler(
    pages: int = 64, caching: bool = True, groups: tuple[KVCacheGroup, ...] = FULL, **limits: int | bool
) -> Scheduler:
    given = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_logit_rows": 32, **limits}
    made = SchedulerLimits(**given)  # type: ignore[arg-type]
    return Scheduler(made, KVCacheManager(PagePool(pages, caching), SIZE, groups, made.max_num_batched_tokens))


def add(s: Scheduler, name: str, tokens: Sequence[int], order: int, priority: int = 0, **facts: Any) -> Request:
    given = {"params": SamplingParams(), "random_key": (0, 0), "max_tokens": 16, "priority": priority, **facts}
    request = Request(CoreRequest(name, tokens, **given), order)
    s.add(request)
    return request


def run(s: Scheduler, token: int = 1) -> dict[str, int]:
    """One step in which every request that is up to date draws `token`."""
    plan = s.schedule()
    s.mark_started(plan)
    for request in plan.tokens:
        if request.num_computed == len(request.token_ids):
            request.append_sampled(token)
    s.check_integrity()
    return {request.request_id: count for request, count in plan.tokens.items()}


def test_prefill_then_decode() -> None:
    s = scheduler()
    add(s, "a", range(10), 0)
    assert run(s) == {"a": 10}
    assert run(s) == {"a": 1}


def test_a_long_prompt_comes_in_chunks_and_decodes_go_first() -> None:
    s = scheduler(max_num_batched_tokens=8)
    add(s, "a", range(3), 0)
    assert run(s) == {"a": 3}
    add(s, "b", range(100, 118), 1)
    assert run(s) == {"a": 1, "b": 7}
    assert run(s) == {"a": 1, "b": 7}
    assert run(s) == {"a": 1, "b": 4}
    assert run(s) == {"a": 1, "b": 1}


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    s = scheduler(max_num_batched_tokens=8, chunked_prefill=False)
    add(s, "a", range(6), 0)
    add(s, "b", range(50, 55), 1)
    assert run(s) == {"a": 6}
    assert run(s) == {"a": 1, "b": 5}


@pytest.mark.parametrize(("rows", "first"), [(7, 6), (6, 6), (5, 5), (3, 3)])
def test_a_scored_prompt_takes_the_rows_that_are_left_to_the_last(rows: int, first: int) -> None:
    """Five positions of six are scored, and the last token samples: six rows."""
    s = scheduler(max_logit_rows=rows)
    add(s, "a", range(6), 0, params=SamplingParams(prompt_logprobs=0))
    plan = s.schedule()
    assert list(plan.tokens.values()) == [first] and plan.num_rows == min(rows, 6)


def test_a_long_prompt_leaves_room_for_others() -> None:
    s = scheduler(long_prefill_threshold=8)
    add(s, "a", range(40), 0)
    add(s, "b", range(50, 58), 1)
    assert run(s) == {"a": 8, "b": 8}
    assert run(s) == {"b": 1, "a": 8}


def test_a_prompt_that_is_not_long_is_not_cut() -> None:
    s = scheduler(long_prefill_threshold=8)
    add(s, "a", range(8), 0)
    assert run(s) == {"a": 8}


def test_drafts_are_no_prompt() -> None:
    """A request that checks guesses is not cut as a long prompt is."""
    s = scheduler(long_prefill_threshold=2)
    a = add(s, "a", range(2), 0)
    assert run(s) == {"a": 2}
    a.append_drafts([5, 6, 7])
    assert s._token_budget(a, StepPlan(), a.num_computed) == 4


def test_a_prompt_beside_a_stream_takes_few_tokens_of_a_step() -> None:
    s = scheduler(prefill_tokens_beside_decode=4)
    add(s, "a", range(20), 0)
    assert run(s) == {"a": 20}, "nothing decodes yet"
    add(s, "b", range(50, 60), 1)
    assert [run(s) for _ in range(4)] == [*[{"a": 1, "b": 4}] * 2, {"a": 1, "b": 2}, {"a": 1, "b": 1}]


def test_prompts_share_the_few_tokens_beside_streams() -> None:
    """Twice as many as requests decode, where that is more than the limit."""
    s = scheduler(prefill_tokens_beside_decode=4)
    for order in range(3):
        add(s, f"stream {order}", [order], order)
    run(s)
    add(s, "b", range(50, 54), 3)
    add(s, "c", range(60, 68), 4)
    streams = {f"stream {order}": 1 for order in range(3)}
    assert [run(s) for _ in range(2)] == [{**streams, "b": 4, "c": 2}, {**streams, "b": 1, "c": 6}]


def test_more_prompts_than_streams_go_first() -> None:
    s = scheduler(prefill_tokens_beside_decode=4)
    add(s, "a", [1], 0)
    run(s)
    for order in (1, 2):
        add(s, f"prompt {order}", [order] * 9, order)
    assert run(s) == {"a": 1, "prompt 1": 9, "prompt 2": 9}


def test_a_run_of_tokens_that_is_longer_is_computed_whole_beside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image's tokens, for example: it must not wait for the end of the stream."""
    s = scheduler(prefill_tokens_beside_decode=4)
    add(s, "a", [1], 0)
    run(s)
    whole = 6
    monkeypatch.setattr(
        s.kv_cache_manager, "align_step_end", lambda _, start, stop: stop if stop - start >= whole else start
    )
    add(s, "b", range(50, 56), 1)
    assert run(s) == {"a": 1, "b": whole}


def test_so_many_prompts_are_partly_computed_at_once() -> None:
    s = scheduler(long_prefill_threshold=8, max_partial_prefills=2)
    for order, name in enumerate("abcd"):
        add(s, name, [order] * (20 if name != "d" else 6), order)
    assert run(s) == {"a": 8, "b": 8, "d": 6}, "d is computed whole, and does not count"
    assert run(s) == {"d": 1, "a": 8, "b": 8}
    assert run(s) == {"d": 1, "a": 4, "b": 4, "c": 8}, "a and b are through with this step"


def test_so_many_of_them_are_long_and_shorter_ones_go_before() -> None:
    s = scheduler(long_prefill_threshold=8, max_num_batched_tokens=20, max_partial_prefills=3, max_long_prefills=1)
    for order, (name, length) in enumerate({"a": 30, "b": 30, "c": 7, "d": 8}.items()):
        add(s, name, [order] * length, order)
    assert run(s) == {"a": 8, "c": 7, "d": 5}, "b is long, as a is"
    assert run(s) == {"c": 1, "a": 8, "d": 3}
    assert run(s) == {"c": 1, "d": 1, "a": 8}
    assert run(s) == {"c": 1, "d": 1, "a": 6, "b": 8}


def test_a_prompt_that_waits_for_its_place_comes_before_later_ones() -> None:
    s = scheduler(max_num_batched_tokens=8, max_partial_prefills=1)
    for order, name in enumerate("abc"):
        add(s, name, [order] * 12, order)
    done: list[str] = []
    for _ in range(5):
        done += [name for name, count in run(s).items() if count > 1 and name not in done]
    assert done == ["a", "b", "c"]


def test_first_come_first_served_within_max_num_seqs() -> None:
    s = scheduler(max_num_seqs=2)
    for order in range(3):
        add(s, "abc"[order], [order] * 3, order)
    assert run(s) == {"a": 3, "b": 3}
    s.remove(s.running[0])
    assert run(s) == {"b": 1, "c": 3}


def test_priority_goes_before_arrival() -> None:
    s = scheduler(max_num_seqs=1, by_priority=True)
    add(s, "late", range(3), 0, priority=5)
    add(s, "early", range(3), 1, priority=-1)
    assert list(run(s)) == ["early"]


def test_the_last_in_line_is_preempted_and_comes_back() -> None:
    s = scheduler(pages=6, caching=False)  # five pages to use
    a, b = add(s, "a", range(8), 0), add(s, "b", range(20, 28), 1)
    assert run(s) == {"a": 8, "b": 8}  # two pages each
    assert run(s) == {"a": 1}  # its third page is the last one
    assert b.num_preemptions == 1 and s.waiting == [b] and b.pages == []
    for _ in range(12):
        if a in s.running and len(a.token_ids) >= 12:
            s.remove(a)
        run(s)
    assert b in s.running and b.num_output > 5


def test_priority_decides_who_is_preempted_even_if_already_in_the_step() -> None:
    s = scheduler(pages=7, caching=True, by_priority=True, max_num_batched_tokens=8)  # six pages to use
    low = add(s, "low", range(15), 0, priority=9)
    run(s), run(s)
    high = add(s, "high", range(30, 47), 1, priority=0)
    for _ in range(8):
        run(s)
    assert high.num_output > 0 and low.num_preemptions >= 1


def test_a_prompt_that_would_stop_half_way_waits_until_all_of_it_fits() -> None:
    s = scheduler(pages=12, caching=False, max_num_batched_tokens=9)  # eleven pages to use
    a, b = add(s, "a", range(8), 0), add(s, "b", range(100, 140), 1)  # two and growing, ten
    for _ in range(16):
        run(s)
    assert b.num_preemptions == 0 and a.num_output == 16
    s.remove(a)
    assert run(s) == {"b": 9}


def test_after_an_interrupted_step_all_begin_again_and_nothing_is_found() -> None:
    s = scheduler()
    a, b = add(s, "a", [*range(12), 77], 0), add(s, "b", [*range(12), 88], 1)
    s.schedule()
    s.start_over([b, a])
    s.check_integrity()
    assert s.pool.num_cached == s.pool.num_used == 0 and s.waiting == [a, b]
    assert run(s) == {"a": 13, "b": 1}


def test_a_cached_beginning_is_not_computed_again() -> None:
    s = scheduler()
    a = add(s, "a", range(11), 0)
    run(s)
    s.remove(a)
    b = add(s, "b", range(11), 1)
    assert run(s) == {"b": 3} and b.num_cached == 8
    assert s.stats().prefix_hits == 8 and s.stats().prefix_queries == 22


def test_at_least_one_token_is_computed() -> None:
    s = scheduler()
    a = add(s, "a", range(8), 0)
    run(s)
    s.remove(a)
    add(s, "b", range(8), 1)
    assert run(s) == {"b": 4}


def test_requests_of_one_step_share_their_beginning() -> None:
    s = scheduler(max_num_batched_tokens=64)
    a, b = add(s, "a", [*range(12), 77], 0), add(s, "b", [*range(12), 88], 1)
    assert run(s) == {"a": 13, "b": 1}
    assert a.pages[0][:3] == b.pages[0][:3] and a.pages[0][3] != b.pages[0][3]


def test_tenants_do_not_share() -> None:
    s = scheduler()
    add(s, "a", range(12), 0), add(s, "b", range(12), 1, salt=b"tenant")
    assert run(s) == {"a": 12, "b": 12}


def test_prompt_logprobs_compute_everything() -> None:
    s = scheduler()
    a = add(s, "a", range(9), 0)
    run(s)
    s.remove(a)
    add(s, "b", range(9), 1, params=SamplingParams(prompt_logprobs=0))
    assert run(s) == {"b": 9}


def test_a_failed_step_leaves_nothing_in_the_cache() -> None:
    s = scheduler()
    a = add(s, "a", range(12), 0)
    s.schedule()
    s.start_over([a])
    s.remove(a)
    assert s.pool.num_cached == 0
    add(s, "b", range(12), 1)
    assert run(s) == {"b": 12}


def test_a_request_preempted_within_its_step_leaves_nothing_in_the_cache() -> None:
    s = scheduler(pages=5)
    a = add(s, "a", range(4), 0)
    plan = s.schedule()
    s._preempt(a, plan)
    assert not plan and plan.num_tokens == 0 and s.pool.num_cached == 0
    s.check_integrity()


def test_an_empty_scheduler_plans_nothing() -> None:
    assert not scheduler().schedule()
    assert StepPlan().num_tokens == 0


def test_all_pages_come_back() -> None:
    s = scheduler(pages=12, max_num_batched_tokens=7)
    requests = [add(s, str(i), range(i, i + 9), i) for i in range(6)]
    for step in range(30):
        run(s)
        if step % 4 == 3 and requests:
            s.remove(requests.pop(step % len(requests)))
            s.check_integrity()
    for request in requests:
        s.remove(request)
    assert s.pool.num_used == 0


def test_integrity_notices_a_request_without_its_pages() -> None:
    s = scheduler()
    a = add(s, "a", range(12), 0)
    run(s)
    s.pool.release(a.pages[0])
    a.pages = [[]]
    with pytest.raises(AssertionError):
        s.check_integrity()


def start(s: Scheduler) -> StepPlan:
    """A step that is left running."""
    plan = s.schedule()
    s.mark_started(plan)
    s.reserve_sampled(plan)
    return plan


def tell(request: Request, token: int = 1) -> None:
    """The oldest step that runs has landed."""
    request.append_sampled(token)


def test_a_step_is_planned_on_tokens_that_nobody_knows_yet() -> None:
    s = scheduler(max_num_batched_tokens=8)
    a, b = add(s, "a", range(3), 0), add(s, "b", range(100, 109), 1)
    assert start(s).tokens == {a: 3, b: 5} and (a.token_ids[3:], b.num_unknown) == ([PLACEHOLDER], 0)
    assert start(s).tokens == {a: 1, b: 4} and (a.num_unknown, b.num_unknown) == (2, 1)
    tell(a, 7)
    assert a.token_ids == [0, 1, 2, 7, PLACEHOLDER] and a.num_computed == 4
    s.check_integrity()


def test_nobody_is_planned_beyond_the_last_token_that_was_asked_for() -> None:
    s = scheduler()
    a = add(s, "a", range(3), 0, max_tokens=2)
    assert [bool(start(s)) for _ in range(3)] == [True, True, False]
    assert (a.num_unknown, a.num_computed) == (1, 4)


def test_a_page_that_an_unknown_token_fills_is_committed_once_it_is_known() -> None:
    s = scheduler()
    a = add(s, "a", range(3), 0)
    start(s)
    plan = start(s)  # the fourth token, which fills the page
    assert plan.late_commits == [a] and s.pool.num_cached == 0
    tell(a, 9)
    s.commit_late(plan)
    assert s.pool.num_cached == 1 and plan.cached_pages == {a: a.pages[0][:1]} and not plan.late_commits
    b = add(s, "b", [0, 1, 2, 9, 5], 1)
    assert start(s).tokens == {a: 1, b: 1}


def test_a_page_of_a_request_that_ended_is_not_committed_late() -> None:
    s = scheduler()
    a = add(s, "a", range(3), 0)
    start(s)
    plan = start(s)
    tell(a)
    s.remove(a)
    del plan.tokens[a]
    s.commit_late(plan)
    s.check_integrity()
    assert s.pool.num_cached == s.pool.num_used == 0


def test_what_interrupted_steps_sample_is_forgotten() -> None:
    s = scheduler()
    a = add(s, "a", range(7), 0)
    start(s), start(s)
    b = add(s, "b", range(9), 1)
    s.schedule()
    s.start_over([a, b])
    s.check_integrity()
    assert (a.token_ids, a.num_unknown, a.num_computed) == (list(range(7)), 0, 0)
    assert s.pool.num_cached == s.pool.num_used == 0 and s.waiting == [a, b]


def test_room_is_what_the_next_step_may_need() -> None:
    s = scheduler(pages=6, caching=False)  # five pages to use
    a, b = add(s, "a", range(7), 0), add(s, "b", range(20, 28), 1)
    assert s.has_room()
    run(s)  # two pages each
    assert s.has_room()  # a has a place left in its second page, b begins a third
    run(s)
    assert not s.has_room()  # a begins a third, too, and there is none
    s.remove(b)
    assert s.has_room() and a in s.running


def test_pages_behind_a_window_are_given_back() -> None:
    s = scheduler(groups=(KVCacheGroup(window=6),), max_num_batched_tokens=8, caching=False)
    a = add(s, "a", range(40), 0)
    held = []
    for _ in range(20):
        run(s)
        held.append(s.pool.num_used)
    assert max(held) <= KVCacheGroup(6).max_pages(60, SIZE, 8) == 5
    assert held[-1] == 2 and a.pages[0][:12] == [0] * 12  # the last token stands at 54, and sees those from 49 on


def test_groups_share_one_pool_and_each_keeps_its_own() -> None:
    s = scheduler(groups=(KVCacheGroup(), KVCacheGroup(window=5)))
    a = add(s, "a", range(30), 0)
    run(s), run(s)
    full, window = a.pages
    assert not set(full) & set(window) and 0 not in full and window[:6] == [0] * 6 and all(window[6:])
    assert s.pool.num_used == 8 + 2
    s.remove(a)
    assert s.pool.num_used == 0


def test_a_beginning_is_found_as_far_as_each_group_has_what_the_next_token_sees() -> None:
    s = scheduler(groups=(KVCacheGroup(), KVCacheGroup(window=5)))
    add(s, "a", range(24), 0)
    run(s), run(s)
    s.remove(s.running[0])
    b = add(s, "b", [*range(22), 99, 98, 97], 1)
    assert run(s) == {"b": 5} and b.num_cached == 20
    full, window = b.pages
    assert all(full[:5]) and window[:4] == [0] * 4 and window[4]
    s.pool.uncache(window[4])  # of tokens 16 to 19
    c = add(s, "c", [*range(22), 99], 2)
    run(s)
    assert c.num_cached == 16, "the window's pages before are still there"


def test_what_a_window_lacks_on_its_right_ends_a_beginning_further_left() -> None:
    s = scheduler(groups=(KVCacheGroup(window=5), KVCacheGroup()))
    a = add(s, "a", range(24), 0)
    run(s)
    windowed, _ = a.pages
    s.pool.uncache(windowed[3])  # of tokens 12 to 15
    b = add(s, "b", [*range(18), 99], 1)
    run(s)
    assert b.num_cached == 12


def test_a_page_of_one_group_is_no_page_of_another() -> None:
    s = scheduler(groups=(KVCacheGroup(), KVCacheGroup(window=100)))
    add(s, "a", range(12), 0)
    b = add(s, "b", range(12), 1)
    assert run(s) == {"a": 12, "b": 4}
    assert not set(b.pages[0]) & set(b.pages[1])


def test_no_page_of_today_is_found_after_a_reset() -> None:
    """Nor one that a running request fills later: its tokens were computed from what is forgotten."""
    s = scheduler(max_num_batched_tokens=8)
    a = add(s, "a", range(16), 0)
    run(s)
    s.kv_cache_manager.reset()
    run(s)
    b = add(s, "b", range(16), 1)
    assert run(s)["b"] == 7 and b.num_cached == 0  # one token of the budget is a's
    run(s)
    s.remove(a)
    s.remove(b)
    c = add(s, "c", range(16), 2)
    run(s)
    assert c.num_cached == 12, "what was computed since is found"
    s.kv_cache_manager.reset()
    s.remove(c)
    add(s, "d", range(16), 3, params=SamplingParams(prompt_logprobs=0))  # it looks for nothing itself
    for _ in range(3):
        run(s)
    e = add(s, "e", range(16), 4)
    run(s)
    assert e.num_cached == 12


def test_a_request_that_waits_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(max_num_seqs=8, pages=8)
    a = add(s, "a", range(16), 0)
    run(s)
    b = add(s, "b", range(100, 120), 1)
    looked = []
    longest = KVCacheManager._longest
    monkeypatch.setattr(KVCacheManager, "_longest", lambda *given: looked.append(1) or longest(*given))
    for _ in range(6):
        assert list(run(s)) == ["a"]
    assert len(looked) == 1 and b.num_cached == 0
    s.remove(a)
    assert run(s) == {"b": 20}


def test_a_request_that_waits_finds_what_is_cached_meanwhile() -> None:
    s = scheduler(pages=10, max_num_seqs=2, max_num_batched_tokens=64)
    a, b = add(s, "a", range(12), 0), add(s, "b", range(50, 62), 1)
    run(s)
    c = add(s, "c", [*range(12), 1, 1, 1, 1, 7, 8], 2)
    run(s), run(s), run(s), run(s)  # a's fourth page is full of ones
    s.remove(b)
    run(s)
    assert c.num_cached == 16 and a in s.running
