"""Who goes first where room is short: held against both rules as they are written, and never those that are spared."""

import random
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintet.engine.kv_transfer.offload.eviction import POLICIES, ARCPolicy, EvictionPolicy, LRUPolicy
from quintet.engine.kv_transfer.offload.host_memory import HostTier
from quintet.ops.pages import gather_pages, scatter_pages

TRACES = st.lists(st.integers(0, 12), max_size=200)


def key(number: int) -> bytes:
    return number.to_bytes(2, "big")


def access(order: EvictionPolicy, number: int) -> bool:
    """Whether it was there; it is afterwards."""
    if key(number) in order:
        order.touch(key(number))
        return True
    kept, _ = order.add(key(number), lambda _: False)
    assert kept and key(number) in order and len(order) <= order.capacity
    return False


def lru(trace: list[int], capacity: int) -> list[bool]:
    held: deque[int] = deque(maxlen=capacity)
    hits = []
    for each in trace:
        hits.append(each in held)
        if each in held:
            held.remove(each)
        held.append(each)
    return hits


def arc(trace: list[int], c: int) -> list[bool]:
    """Figure 4 of Megiddo and Modha, line by line, on lists whose last is the most recent."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, hits = 0.0, []

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in trace:
        hits.append(x in t1 or x in t2)
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(float(c), p + max(len(b2) / len(b1), 1.0))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0.0, p - max(len(b1) / len(b2), 1.0))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits


@given(TRACES, st.integers(1, 8))
def test_least_recently_used_goes_first(trace: list[int], capacity: int) -> None:
    order = LRUPolicy(capacity)
    assert [access(order, each) for each in trace] == lru(trace, capacity)


@given(TRACES, st.integers(1, 8))
def test_arc_is_the_papers(trace: list[int], capacity: int) -> None:
    order = ARCPolicy(capacity)
    assert [access(order, each) for each in trace] == arc(trace, capacity)


def test_a_long_scan_does_not_drive_out_what_all_ask_for() -> None:
    """Ten keys that come again and again, and between them a thousand that never do."""
    hits = {}
    for name, made in POLICIES.items():
        order, rng, scan = made(20), random.Random(1), iter(range(100, 10_000))
        for _ in range(4):
            for number in range(10):
                access(order, number)
        found = 0
        for _ in range(100):
            for _ in range(15):
                access(order, next(scan))
            found += sum(access(order, rng.randrange(10)) for _ in range(5))
        hits[name] = found
    assert hits["arc"] > 450 > hits["lru"]


@pytest.mark.parametrize("name", POLICIES)
def test_who_is_spared_stays_and_who_finds_no_room_is_not_kept(name: str) -> None:
    order = POLICIES[name](3)
    for number in range(3):
        access(order, number)
    spared = {key(0), key(2)}
    assert order.add(key(7), lambda each: each in spared) == (True, [key(1)])
    spared.add(key(7))
    assert order.add(key(8), lambda each: each in spared) == (False, [])
    assert len(order) == 3 and key(8) not in order
    order.remove(key(7))
    order.remove(key(7))
    assert order.add(key(8), lambda each: each in spared) == (True, [])


@given(TRACES, st.sampled_from(sorted(POLICIES)), st.sets(st.integers(0, 12), max_size=2))
def test_host_memory_gives_back_what_was_put_in(trace: list[int], name: str, spared: set[int]) -> None:
    host = HostTier(5, 3, name)
    assert host.capacity == 5
    for number in trace:
        row = torch.full((3,), number, dtype=torch.int32).numpy()
        host.put(key(number), row, lambda other: int.from_bytes(other, "big") in spared)
        there = [each for each in range(13) if key(each) in host]
        assert len(there) == len(host) <= 5
        if there:
            assert host.get([key(each) for each in there])[:, 1].tolist() == there
    host.clear()
    assert len(host) == 0 and not any(key(each) in host for each in range(13))


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (2, 1, 1, 3), (5,)], ids=str)
def test_pages_go_and_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of every type a cache may have, pages of odd sizes among them; the others stay as they are."""
    drawn = torch.Generator().manual_seed(0)
    size = torch.zeros(shape, dtype=dtype).nbytes
    kept = torch.randint(0, 256, (6, size), dtype=torch.uint8, generator=drawn).view(dtype).reshape(6, *shape)
    before = kept.clone().view(torch.uint8)
    rows = gather_pages(kept, torch.tensor([4, 1], dtype=torch.int32))
    assert rows.dtype == torch.int32 and rows.shape == (2, -(-size // 4))
    after = scatter_pages(kept, torch.tensor([2, 5], dtype=torch.int32), rows).view(torch.uint8)
    for page, came_from in enumerate([0, 1, 4, 3, 4, 1]):
        assert torch.equal(after[page], before[came_from]), page
