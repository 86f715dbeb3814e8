"""Bookkeeping of the row store: which pages of it hold which items, and for whom. No tensors.

A request takes the items that its next tokens touch when a step is planned, and holds them until it has computed past
them. Rows without a holder stay until their pages are needed, those that were released longest ago first: the same
item is found until then. A request whose items find no room computes its tokens up to them, or waits. It never waits
for itself or for one that waits for it: it needs no further item before it is past those that it holds.
"""

from collections.abc import Iterable

from quintet.engine.kv_cache.manager import group_hash
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.request import Request
from quintet.engine.row_store.items import EMBEDS_ROWS, PromptRows, RowItem, RowWrite, embeds_items, pages_of, rows_of
from quintet.engine.row_store.media import media_items
from quintet.layers.row_store import PAGE_ROWS


class RowStoreManager:
    """Pages of the row store, counted and shared."""

    def __init__(self, num_rows: int, whole_runs: bool = False) -> None:
        """num_rows: that items can have, a multiple of PAGE_ROWS. whole_runs: see RowStoreSizes."""
        self.whole_runs = whole_runs
        self.pool = PagePool(1 + num_rows // PAGE_ROWS)  # page 0 holds zeros
        self._most = min(EMBEDS_ROWS, num_rows)  # rows of an item of prompt embeddings
        self._holders: dict[Request, None] = {}
        self._writes: dict[bytes, RowWrite] = {}  # items that are taken and not written yet
        self._is_short = False  # a request of the plan found no room: those behind it take nothing from it

    def begin_plan(self, writes: dict[bytes, RowWrite]) -> None:
        """Begins the plan of a step, which writes what this dict gets, and then clears it. Requests let go of the items
        that they have computed past."""
        writes |= self._writes  # of a plan that was not started
        self._writes, self._is_short = writes, False
        for request in list(self._holders):
            rows = request.prompt_rows
            assert rows is not None, "a holder has rows"
            ends = {index: rows.items[index].stop for index in rows.pages}
            self._let_go(request, rows, [index for index, end in ends.items() if end <= request.num_computed])

    def end_within(self, request: Request, start: int, stop: int) -> int:
        """Returns how far the request can compute its tokens from `start` on, up to `stop`: to the first item that
        finds no room."""
        if start >= request.num_prompt or (rows := self._rows(request)) is None:
            return stop
        free, counted = self.pool.num_free, set[bytes]()
        for index, item in rows.touched(start, stop):
            if index in rows.pages or item.key in counted:
                continue
            need = self._free_pages_for(item)
            if need and (need > free or self._is_short):
                self._is_short = True
                return max(start, item.first)
            free -= need
            counted.add(item.key)
        return stop

    def before_runs(self, request: Request, start: int, stop: int) -> int:
        """Returns where a step that computes tokens from `start` on ends, at `stop` or before: where runs of tokens are
        whole, none is cut. `start`: it waits for a step with more room."""
        rows = self._rows(request) if self.whole_runs else None
        for _, item in () if rows is None else rows.touched(start, stop):
            for first, count, _ in item.runs(item.first, item.stop) if item.attends_ahead else ():
                if first < stop < first + count:
                    return max(start, first)
        return stop

    def hold(self, request: Request, start: int, stop: int) -> None:
        """The request computes these tokens in the planned step: it takes their items, which end_within() found room
        for. Those that are not there are written."""
        if start >= request.num_prompt or (rows := self._rows(request)) is None:
            return
        wanted = [(index, item) for index, item in rows.touched(start, stop) if index not in rows.pages]
        if not wanted:
            return
        self._holders[request] = None
        missing = []
        for index, item in wanted:  # first those that are there: pages for the others may be taken from their number
            if not self._retain(rows, index, item):
                missing.append((index, item))
        for index, item in missing:
            if not self._retain(rows, index, item):  # it may come twice
                self._take(rows, index, item)

    def _rows(self, request: Request) -> PromptRows | None:
        """Returns the request's items; None if it has none."""
        if request.prompt_rows is None and request.core_request.embeds:
            request.prompt_rows = PromptRows(embeds_items(request.core_request, self._most))
        if request.prompt_rows is None and request.core_request.media:
            request.prompt_rows = PromptRows(media_items(request.core_request))
        return request.prompt_rows

    def _found(self, item: RowItem) -> list[int] | None:
        """Returns the pages that hold the item; None if not all of it is there."""
        hashes = [group_hash(item.key, at) for at in range(pages_of(item))]
        return [self.pool.page(each) for each in hashes] if all(map(self.pool.has, hashes)) else None

    def _free_pages_for(self, item: RowItem) -> int:
        """Pages that are free and would be no more."""
        pages = self._found(item)
        return pages_of(item) if pages is None else sum(map(self.pool.is_free, pages))

    def _retain(self, rows: PromptRows, index: int, item: RowItem) -> bool:
        """Holds the item if it is there."""
        pages = self._found(item)
        if pages is None:
            return False
        self.pool.retain(pages)
        rows.pages[index] = pages
        return True

    def _take(self, rows: PromptRows, index: int, item: RowItem) -> None:
        """Takes pages for an item that is not there, and has it written."""
        assert pages_of(item) <= self.pool.num_free, "the caller has seen that there is room"
        pages = rows.pages[index] = sorted(self.pool.allocate(pages_of(item)))  # rows side by side are written at once
        for at, page in enumerate(pages):
            digest = group_hash(item.key, at)
            if self.pool.has(digest):  # the rest of it was given to others
                self.pool.uncache(self.pool.page(digest))
            self.pool.commit(page, digest)
        self._writes[item.key] = RowWrite(item, rows_of(pages)[: item.count])

    def _let_go(self, request: Request, rows: PromptRows, indices: Iterable[int]) -> None:
        for index in indices:
            pages, key = rows.pages.pop(index), rows.items[index].key
            self.pool.release(pages)
            if key in self._writes and self.pool.is_free(pages[0]):  # it will not be written
                del self._writes[key]
                for page in pages:
                    self.pool.uncache(page)
        if not rows.pages:
            del self._holders[request]

    def release(self, request: Request) -> None:
        """Releases all items of a request."""
        if request in self._holders:
            assert request.prompt_rows is not None, "a holder has rows"
            self._let_go(request, request.prompt_rows, list(request.prompt_rows.pages))

    def reset(self) -> None:
        """No row of today is found from now on: what makes rows of items may have changed."""
        self.pool.reset_cache()

    def clear(self) -> None:
        """Frees all pages, whatever the bookkeeping held."""
        for request in self._holders:
            if request.prompt_rows is not None:
                request.prompt_rows.pages.clear()
        self._holders.clear()
        self._writes.clear()
        self.pool.clear()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that the pool's counts agree with the items that `requests`, the running ones, hold."""
        running = [each for each in requests if each.prompt_rows is not None and each.prompt_rows.pages]
        assert set(running) == set(self._holders), "other requests hold rows than those that run"
        self.pool.check_integrity(pages for each in self._holders for pages in each.prompt_rows.pages.values())  # type: ignore[union-attr]
