"""Adapters of a queue: as many in host memory as there may be, in the order of the queue, each in its turn."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from quintet.engine.request import CoreRequest
from tests.engine.lora.shelves import Shelf, asked, engine_of, named
from tests.engine.test_overlap import Served

STEPS = 2000


def steps(served: Served, shelf: Shelf, max_cpu_loras: int) -> Iterator[list[str]]:
    """Runs to the end and gives the requests that ended in each step, without an error; checks host memory. What was on
    the device in the last step has until the next one to leave."""
    before: set[str] = set()
    for _ in range(STEPS):
        if not served.engine.busy:
            return
        ended = []
        for delta in served.engine.step():
            assert delta.error is None, delta.error
            ended += [delta.request_id] * (delta.finish_reason is not None)
        served.engine.check_integrity()
        on_device = {each.lora.reference.name for each in served.engine.scheduler.running if each.lora is not None}
        assert len(shelf.names - on_device - before) <= max_cpu_loras
        before = on_device
        yield ended
    raise AssertionError("it goes round in circles")


def run(served: Served, shelf: Shelf, max_cpu_loras: int, requests: Iterable[CoreRequest]) -> list[str]:
    """Returns the requests in the order in which they ended."""
    for request in requests:
        served.engine.add(request)
    return [each for ended in steps(served, shelf, max_cpu_loras) for each in ended]


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (1, 3), (2, 2), (3, 5)])
def test_a_queue_of_many_adapters_holds_no_more_than_there_may_be(max_loras: int, max_cpu_loras: int) -> None:
    shelf = Shelf()
    served = engine_of(shelf, max_loras, max_cpu_loras)
    names = [f"a{number}" for number in range(12)]
    ended = run(served, shelf, max_cpu_loras, [asked(f"r{at}", names[at * 5 % 12]) for at in range(30)])
    assert len(ended) == 30 and len(shelf.names) <= max_cpu_loras
    assert served.engine.lora is not None and len(served.engine.lora.loaded) <= max_cpu_loras


def test_adapters_are_read_in_the_order_of_the_queue() -> None:
    reads = []
    for _ in range(2):
        shelf = Shelf()
        served = engine_of(shelf, 1, 1, scheduling_policy="priority")
        first, *others = [asked(f"r{at}", f"a{at}", priority=-at) for at in range(6)]
        served.engine.add(first)
        assert served.engine.lora is not None
        served.engine.lora.load(named("a0")).wait()
        run(served, shelf, 1, others)
        reads.append(shelf.read)
    assert reads[0] == ["a0", "a5", "a4", "a3", "a2", "a1", "a0"] == reads[1]  # a0 was there before the others came


def test_an_adapter_gets_its_turn_whatever_comes_after_it() -> None:
    shelf = Shelf()
    served = engine_of(shelf, 1, 1)
    for at, name in enumerate(["a", "b", "z"]):
        served.engine.add(asked(f"{name}{at}", name))
    turns = steps(served, shelf, 1)
    for at, ended in enumerate(turns):
        if "z2" in ended:
            break
        assert at < 300, "z waits while a and b go on"
        for name in "ab":
            served.engine.add(asked(f"{name} {at}", name))
    served.engine.abort([each.request_id for each in served.engine.scheduler.waiting])


def test_an_adapter_that_lost_its_place_and_is_gone_ends_its_request() -> None:
    shelf = Shelf()
    served = engine_of(shelf, 1, 1, scheduling_policy="priority")
    served.engine.add(asked("late", "a", priority=1))
    assert served.engine.lora is not None
    served.engine.lora.load(named("a")).wait()
    served.engine.add(asked("first", "b", priority=0))
    shelf.bad.add("a")
    errors: dict[str, str | None] = {}
    while served.engine.busy:
        errors |= {each.request_id: each.error for each in served.engine.step() if each.finish_reason}
    assert errors == {"first": None, "late": "the adapter 'a' cannot be served: no file of a"}


@pytest.mark.parametrize("call", [lambda lora: lora.check(named("b")), lambda lora: lora.check(named("bad"))])
def test_a_check_waits_for_no_request(call: Callable[..., str]) -> None:
    shelf = Shelf()
    shelf.bad.add("bad")
    served = engine_of(shelf, 1, 1)
    served.engine.add(asked("r", "a"))
    assert served.engine.lora is not None
    assert call(served.engine.lora) in ("", "no file of bad")
    assert served.engine.lora.loaded == [named("a")] or not served.engine.lora.loaded
    assert run(served, shelf, 1, []) == ["r"]
