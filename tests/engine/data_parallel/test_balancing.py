"""Which of several engines takes a request, and the sums of what they tell."""

from hypothesis import given
from hypothesis import strategies as st

from quintet.engine.data_parallel.balancing import MAX_EXTRA_REQUESTS, MAX_KNOWN_PAGES, LoadBalancer
from quintet.engine.observability.stats import STEP_BOUNDS, SchedulerStats, SpecDecodeStats, Stats, StepStats, total

PAGE = 4


def stats(running: int = 0, waiting: int = 0, sizes: tuple[int, ...] = (), accepted: tuple[int, ...] = ()) -> Stats:
    queues, steps = SchedulerStats(running, waiting, 0.5, 5, 6, 7), StepStats(1, 2, step_sizes=sizes)
    return Stats(queues, steps, SpecDecodeStats(accepted_at=accepted), asleep=1)


def test_requests_of_different_prompts_take_turns() -> None:
    router = LoadBalancer(3, PAGE)
    assert [router.choose(str(i), [i] * 9) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert router.loads == [2, 2, 2]


def test_who_has_less_to_do_is_asked_first() -> None:
    router = LoadBalancer(2, PAGE)
    assert router.choose("a", [1], weight=3) == 0
    assert [router.choose(name, [2]) for name in "bcd"] == [1, 1, 1]
    assert router.close("a") == 0 and router.close("a") is None
    assert router.choose("e", [3]) == 0


def test_a_beginning_that_is_known_goes_where_it_is_known() -> None:
    router = LoadBalancer(2, PAGE)
    shared = list(range(9))
    assert router.choose("a", shared) == 0
    assert router.close("a") == 0
    assert router.choose("b", [7] * 9) == 1
    assert router.choose("c", [*shared, 20, 21]) == 0
    assert router.choose("d", [*shared, 30, 31]) == 0, "0 has as much to do as 1, or little more"
    assert router.choose("short", shared[:3]) == 1, "no page is whole"


def test_a_known_beginning_is_not_worth_a_long_line() -> None:
    router = LoadBalancer(2, PAGE)
    chosen = [router.choose(str(i), list(range(8))) for i in range(20)]
    assert chosen[: MAX_EXTRA_REQUESTS + 1] == [0] * (MAX_EXTRA_REQUESTS + 1) and chosen[MAX_EXTRA_REQUESTS + 1] == 1
    assert abs(router.loads[0] - router.loads[1]) <= MAX_EXTRA_REQUESTS + 1


def test_salted_and_other_prompts_are_kept_apart() -> None:
    router = LoadBalancer(2, PAGE)
    assert router.choose("a", list(range(8)), b"one") == 0
    assert router.choose("b", list(range(8)), b"two") == 1
    router.close("a"), router.close("b")
    assert router.choose("c", [9, *range(1, 8)]) == 0, "alike but for its first token"
    router.close("c")
    assert router.choose("d", list(range(8)), b"two") == 1
    router.close("d")
    router.clear_prefixes()
    assert router.choose("e", list(range(8)), b"two") == 0, "as if nothing were known"


def test_what_others_send_counts_and_what_was_sent_here_counts_once() -> None:
    router = LoadBalancer(2, PAGE)
    router.choose("a", [1])
    router.update_load(0, stats(running=1))
    assert router.loads == [1, 0]
    router.update_load(1, stats(running=4, waiting=2))
    assert router.loads == [1, 6]
    assert [router.choose(name, [2]) for name in "bcdef"] == [0] * 5
    router.update_load(1, stats())
    assert router.loads == [6, 0]


def test_what_is_remembered_is_bounded() -> None:
    router = LoadBalancer(1, 1)
    for start in range(0, 3 * MAX_KNOWN_PAGES, 1000):
        router.choose(str(start), range(start, start + 1000))
    assert len(router._pages[0]) == MAX_KNOWN_PAGES


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4)), max_size=60), st.integers(1, 4))
def test_loads_are_what_is_open(events: list[tuple[bool, int, int]], count: int) -> None:
    router, open_requests = LoadBalancer(count, PAGE), dict[str, tuple[int, int]]()
    for number, (closes, prompt, weight) in enumerate(events):
        if closes and open_requests:
            name = next(iter(open_requests))
            assert router.engine_of(name) == open_requests[name][0]
            assert router.close(name) == open_requests.pop(name)[0]
        else:
            before = router.loads
            engine = router.choose(str(number), [prompt] * 8, weight=weight)
            assert before[engine] <= min(before) + MAX_EXTRA_REQUESTS
            open_requests[str(number)] = engine, weight
    for engine in range(count):
        assert router.loads[engine] == sum(weight for at, weight in open_requests.values() if at == engine)


def test_numbers_of_several_are_added_up() -> None:
    sizes = tuple(range(len(STEP_BOUNDS) + 1))
    both = total([stats(1, 2, sizes, (3, 1)), stats(4, 0, sizes, (2,))])
    assert both.scheduler == SchedulerStats(5, 2, 0.5, 10, 12, 14) and both.asleep == 1
    assert both.steps == StepStats(2, 4, step_sizes=tuple(2 * each for each in sizes))
    assert both.spec_decode.accepted_at == (5, 1)
    assert total([stats(1)]) == stats(1)
    assert total([]) == Stats() and total([]).scheduler.num_running == 0
