"""Bookkeeping of the row store: a test plays the device, and reads in every step what the plan says is written."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.request import CoreRequest, Request
from quintet.engine.row_store.items import EMBEDS_ROWS, PromptRows, embeds_items
from quintet.engine.row_store.manager import RowStoreManager
from quintet.engine.scheduler import Scheduler
from quintet.engine.step_plan import SchedulerLimits, StepPlan
from quintet.layers.row_store import PAGE_ROWS
from quintet.sampling_params import SamplingParams


class Played:
    """A scheduler, and a device whose rows are one number each."""

    def __init__(self, rows: int, pages: int = 400, tokens: int = 24, chunked: bool = True) -> None:
        self.books = RowStoreManager(rows)
        limits = SchedulerLimits(8, tokens, tokens, chunked_prefill=chunked)
        self.tables = KVCacheManager(PagePool(pages), 4, max_step_tokens=tokens, row_store=self.books)
        self.scheduler, self.device = Scheduler(limits, self.tables), np.full(PAGE_ROWS + rows, np.nan, np.float32)
        self.written, self.count = 0, 0

    def add(self, values: Sequence[float], priority: int = 0, max_tokens: int = 2, embeds: bool = True) -> Request:
        content = np.array(values, np.float32).tobytes() if embeds else b""
        facts = CoreRequest(
            str(self.count), [0] * len(values), SamplingParams(), (0, 0), max_tokens, priority=priority, embeds=content
        )
        request = Request(facts, self.count)
        self.count += 1
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for write in plan.row_writes.values():
            self.device[write.places] = np.frombuffer(write.item.content, np.float32)  # type: ignore[attr-defined]
            self.written += write.item.count
        plan.row_writes.clear()
        for request, count in plan.tokens.items():
            start, stop = request.num_computed, min(request.num_computed + count, request.num_prompt)
            if request.core_request.embeds and start < stop:
                assert request.prompt_rows is not None
                places = request.prompt_rows.places(start, stop)
                assert places.min() >= PAGE_ROWS, "every token has a row, and none of the first page"
                assert self.device[places].tobytes() == bytes(request.core_request.embeds_of(start, stop))
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        self.scheduler.mark_started(plan)
        for request in list(plan.tokens):
            if request.num_computed == len(request.token_ids) and request.append_sampled(1) is not None:
                self.scheduler.remove(request)
        self.scheduler.check_integrity()
        return plan

    def drain(self, most: int = 1000) -> int:
        """Steps until all have ended -> how many steps it took."""
        for steps in range(most):
            if not (self.scheduler.running or self.scheduler.waiting):
                return steps
            self.step()
        raise AssertionError("requests wait for one another")


def distinct(count: int, first: int = 0) -> list[float]:
    return [float(each) for each in range(first, first + count)]


def test_a_row_is_written_once_and_found_by_a_second_request() -> None:
    played = Played(256)
    played.add(distinct(100))
    played.drain()
    assert played.written == 100
    played.tables.pool.reset_cache()
    played.add(distinct(100))
    played.drain()
    assert played.written == 100, "the rows of the first are there, though its KV pages are not"
    played.add(distinct(100, first=1))
    played.drain()
    assert played.written == 200


def test_rows_within_a_found_prefix_are_not_written() -> None:
    played = Played(EMBEDS_ROWS, tokens=EMBEDS_ROWS)
    played.add(distinct(4 * EMBEDS_ROWS))
    played.drain()
    assert played.written == 4 * EMBEDS_ROWS
    played.add(distinct(4 * EMBEDS_ROWS))
    played.drain()
    assert played.written == 4 * EMBEDS_ROWS, "only the last token is left to compute, and its rows are there"
    played.add([*distinct(3 * EMBEDS_ROWS), *distinct(EMBEDS_ROWS, first=9000)])
    played.drain()
    assert played.written == 5 * EMBEDS_ROWS


def test_items_are_held_until_they_are_computed_and_then_go_to_the_next() -> None:
    played = Played(EMBEDS_ROWS, tokens=EMBEDS_ROWS // 2)
    first, second = played.add(distinct(EMBEDS_ROWS)), played.add(distinct(EMBEDS_ROWS, first=500))
    assert list(played.step().tokens) == [first]
    assert played.books.pool.num_free == 0
    assert list(played.step().tokens) == [first], "the rest of its item leaves the second no room"
    assert list(played.step().tokens) == [first, second]
    played.drain()


def test_a_request_of_tokens_waits_for_none() -> None:
    played = Played(16, tokens=40)
    played.add(distinct(16))
    tokens = played.add([0.0] * 20, embeds=False)
    assert played.step().tokens[tokens] == 20


def test_rows_that_come_twice_in_a_prompt_are_held_once() -> None:
    played = Played(EMBEDS_ROWS, tokens=3 * EMBEDS_ROWS)
    request = played.add([1.0] * 3 * EMBEDS_ROWS)
    assert played.step().tokens[request] == 3 * EMBEDS_ROWS
    assert played.written == EMBEDS_ROWS
    played.drain()


def test_an_older_request_is_not_overtaken_by_ones_with_smaller_items() -> None:
    played = Played(EMBEDS_ROWS)
    books, first, old, late = played.books, *(played.add(distinct(n, 1000 * n)) for n in (16, EMBEDS_ROWS, 17))
    books.begin_plan({})
    books.hold(first, 0, books.end_within(first, 0, 16))
    assert books.end_within(old, 0, EMBEDS_ROWS) == 0
    assert books.end_within(late, 0, 17) == 0, "there are pages for it, and the one before it has none"
    assert books.end_within(first, 3, 16) == 16, "what is held goes on"
    books.begin_plan({})
    assert books.end_within(late, 0, 17) == 17


def test_a_request_that_ends_before_its_step_leaves_no_row_behind() -> None:
    played = Played(64)
    request = played.add(distinct(20))
    plan = played.scheduler.schedule()
    assert len(plan.row_writes) == 1
    played.scheduler.drop_planned(plan, request)
    played.scheduler.remove(request)
    assert not plan.row_writes and played.books.pool.num_cached == 0 and played.books.pool.num_used == 0
    played.scheduler.check_integrity()


def test_what_was_written_before_a_reset_is_not_found_and_what_is_held_stays() -> None:
    played = Played(128, tokens=32)
    one = played.add(distinct(EMBEDS_ROWS))
    played.step()
    played.tables.reset()
    two = played.add(distinct(EMBEDS_ROWS))
    assert set(played.step().tokens) == {one} and two in played.step().tokens
    assert played.written == 2 * EMBEDS_ROWS
    played.drain()


def test_items_are_found_by_position() -> None:
    facts = CoreRequest("0", [0] * 150, SamplingParams(), (0, 0), 1, embeds=np.arange(150, dtype=np.float32).tobytes())
    rows = PromptRows(embeds_items(facts, 64))
    assert [(item.first, item.count) for item in rows.items] == [(0, 64), (64, 64), (128, 22)]
    found = {
        at: [index for index, _ in rows.touched(*at)] for at in ((0, 1), (63, 65), (64, 128), (149, 150), (150, 160))
    }
    assert found == {(0, 1): [0], (63, 65): [0, 1], (64, 128): [1], (149, 150): [2], (150, 160): []}
    rows.pages = {1: [3, 1, 2, 7]}
    assert rows.places(64, 66).tolist() == [48, 49] and rows.places(79, 81).tolist() == [63, 16]
    with pytest.raises(KeyError):
        rows.places(0, 1)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_comes_every_step_reads_its_own_rows_and_all_requests_end(data: st.DataObject) -> None:
    """Random requests that share rows, aborts, lost caches; stores of a page to a few items, KV pages for few."""
    chunked = data.draw(st.booleans())
    rows = data.draw(st.sampled_from((16, 32, 64, 80, 144))) if chunked else 144
    tokens = data.draw(st.sampled_from((5, 24, 100))) if chunked else 144
    played = Played(rows, pages=data.draw(st.sampled_from((45, 90, 400))), tokens=tokens, chunked=chunked)
    requests: list[Request] = []
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(("add", "add", "step", "step", "abort", "reset", "start over")))
        if what == "add":
            length, value = data.draw(st.integers(1, 140)), data.draw(st.sampled_from((0, 0, 70, 500)))
            values = distinct(length, value) if data.draw(st.booleans()) else [float(value)] * length
            embeds = data.draw(st.sampled_from((True, True, False)))
            requests.append(played.add(values, embeds=embeds, priority=data.draw(st.integers(0, 1))))
        elif what == "step":
            played.step()
        elif what == "abort":
            here = [*played.scheduler.running, *played.scheduler.waiting]
            if here:
                played.scheduler.remove(data.draw(st.sampled_from(here)))
        elif what == "reset":
            played.tables.reset()
        else:
            played.scheduler.start_over([*played.scheduler.running, *played.scheduler.waiting])
        played.scheduler.check_integrity()
    played.drain()
    assert played.books.pool.num_used == 0
