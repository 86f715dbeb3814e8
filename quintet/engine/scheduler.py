"""Scheduler: gives each request a number of tokens of one step's budget. Plain data; no device, no tensors.

Prefill, chunked prefill and decode are the same thing, a stretch num_computed : num_computed + n of a request's
tokens. A request is waiting or running; a running one holds the pages of its computed tokens.

A step may be planned while the one before it runs: expect() then leaves places for the tokens that are not known yet.
Request (request.py) has the drawing of its tokens: which are cached, computed and known, and what moves each border.
A device runs steps in the order in which they were started, so a page that goes from one request to another is written
by a later step after every earlier one, and no step has to wait for it.
"""

import bisect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

from quintet.engine.kv_cache.manager import KVCacheManager, PrefixMatch, clear_cache_state, missing_pages
from quintet.engine.kv_transfer.manager import KVTransferManager, LoadState
from quintet.engine.lora.slots import LoRASlots
from quintet.engine.observability.stats import SchedulerStats
from quintet.engine.request import PLACEHOLDER, Request
from quintet.engine.step_plan import SchedulerLimits, StepPlan

SortKey = tuple[int, int]
MAX_OVERTAKEN = 64  # requests with adapters that may start before one that waits for a slot


class Scheduler:
    """Scheduler of requests: two ordered lists (waiting, running), and the pages that requests hold."""

    def __init__(
        self,
        limits: SchedulerLimits,
        tables: KVCacheManager,
        max_num_drafts: int = 0,
        kv_transfer: KVTransferManager | None = None,
        lora: LoRASlots | None = None,
    ) -> None:
        self.limits: Final = limits
        self.kv_cache_manager: Final = tables
        self.pool: Final = tables.pool
        self.kv_transfer: Final = kv_transfer
        self._lora = lora
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._num_queries = self._num_hits = 0  # tokens looked up in the prefix cache, and found there
        self._num_fetched = 0  # that the KV connector loaded
        self._num_preemptions = 0
        self.max_num_drafts: Final = max_num_drafts  # of a request in a step
        self.last_order = sys.maxsize  # of the requests that may start: those after it wait while a pause begins
        self._longest = limits.long_prefill_threshold or sys.maxsize  # chunk of a prompt
        self._prompt_stop = sys.maxsize  # tokens of a step after which it takes no more of prompts
        self._limits_partial = limits.max_partial_prefills is not None or limits.max_long_prefills is not None
        self._key: Callable[[Request], SortKey] = _by_priority if limits.by_priority else _by_order

    def stats(self) -> SchedulerStats:
        """Returns the lengths of the queues, the use of pages, and counters."""
        usage = self.pool.num_used / (self.pool.num_pages - 1)
        counts = self._num_preemptions, self._num_queries, self._num_hits, self._num_fetched
        return SchedulerStats(len(self.running), len(self.waiting), usage, *counts)

    @property
    def counts(self) -> dict[str, int]:
        """Counts for a trace: requests, and tokens that are to be computed."""
        left = sum(len(each.token_ids) - each.num_computed for each in (*self.running, *self.waiting))
        return {"requests": len(self.running), "waiting": len(self.waiting), "tokens": left}

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands, and frees its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:  # in neither, if Ctrl-C came while it was added
                queue.remove(request)
                break
        if self.kv_transfer is not None:
            self.kv_transfer.cancel_request(request)
        self.kv_cache_manager.release(request)

    def offer_pages(self, request: Request) -> dict[str, Any] | None:
        """Returns kv_transfer_params for the response of a request that ends, if another engine continues it."""
        return None if self.kv_transfer is None or not request.pages else self.kv_transfer.offer_pages(request)

    def schedule(self) -> StepPlan:
        """Decodes first, then prefills that have begun, then those that wait, as far as budget and pages go."""
        plan = StepPlan()
        for store in (self.kv_cache_manager.row_store, self.kv_cache_manager.encoder):
            if store is not None:
                store.begin_plan(plan.row_writes)
        self._free_out_of_window()
        decodes = self._decoding()
        prefills = [r for r in self.running if len(r.token_ids) - r.num_computed != 1]
        if self.max_num_drafts:
            self._take_drafts(decodes)
        tokens, prompts = sum(len(r.token_ids) - r.num_computed for r in decodes), len(prefills) + len(self.waiting)
        self._prompt_stop = tokens + self.limits.prompt_tokens_beside(len(decodes), prompts)
        for requests, size in ((decodes, self._token_budget), (prefills, self._chunk_size)):
            for request in requests:
                if plan.preempted and request not in self.running:
                    continue
                count = size(request, plan, request.num_computed)
                if count > 0:
                    self._allocate(request, plan, count)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def _decoding(self) -> list[Request]:
        """Returns the requests that the next step decodes."""
        decodes = [r for r in self.running if len(r.token_ids) - r.num_computed == 1]
        return decodes[: -(-len(self.running) // self.limits.num_stages)]  # the others' step follows this one

    def _free_out_of_window(self) -> None:
        for request in self.running if self.kv_cache_manager.windows else ():
            self.kv_cache_manager.free_out_of_window(request)

    def draft_room(self) -> list[tuple[Request, int]]:
        """Returns the requests that the next step decodes, each with the most `draft_tokens` that it may have, were it
        the only one with any; schedule() takes fewer of the later ones where they do not fit together."""
        self._free_out_of_window()
        decodes = self._decoding()
        left = min(self._draft_budget(decodes), self.max_num_drafts) if self.has_room() else 0
        return [(r, 0 if r.num_unknown else max(0, min(left, r.tokens_left - 1))) for r in decodes]

    def _draft_budget(self, decodes: Sequence[Request]) -> int:
        """Returns how many drafts these may have together: they leave prompts at least half of the tokens and rows of
        logits that are left."""
        left = min(self.limits.max_num_batched_tokens, self.limits.max_logit_rows) - len(decodes)
        return left // 2 if self.waiting or len(self.running) > len(decodes) else left

    def _take_drafts(self, decodes: Sequence[Request]) -> None:
        """Appends the `draft_tokens` of requests that decode, as far as they fit; none takes a page from a request."""
        left = self._draft_budget(decodes)
        for request in decodes:
            most = min(left, request.tokens_left - 1)
            if request.draft_tokens and request.num_unknown == 0 and most > 0:
                request.append_drafts(request.draft_tokens[:most])
                left -= request.num_drafts
            request.draft_tokens = []
        if not self.has_room():
            for request in decodes:
                if request.num_drafts:
                    request.drop_unknown()

    def has_room(self) -> bool:
        """True if there are free pages for the next tokens of all running requests, without preemption."""
        most, free = self.limits.max_num_batched_tokens, self.pool.num_free
        groups = len(self.kv_cache_manager.groups)
        begun = len(self.running) + most // self.kv_cache_manager.page_size  # each begins a page, and fills others
        if free >= groups * begun:
            return True
        ends = [(request, min(len(request.token_ids), request.num_computed + most)) for request in self.running]
        return sum(missing_pages(request, end, self.kv_cache_manager.page_size) for request, end in ends) <= free

    def _token_budget(self, request: Request, plan: StepPlan, start: int) -> int:
        """Tokens from `start` on that the step has room for: within its budget, and that of rows of logits.

        Rows are never short for decodes: they come first, and there are rows for max_num_seqs of them.
        """
        count = min(self.limits.max_num_batched_tokens - plan.num_tokens, len(request.token_ids) - start)
        if self.kv_cache_manager.row_store is not None:
            count = self.kv_cache_manager.row_store.end_within(request, start, start + count) - start
        left = self.limits.max_logit_rows - plan.num_rows
        if count <= left or request.num_rows(start, count) <= left:  # no token has more than one row
            return count
        scored = request.scored_positions(start, count)
        return max(0, min(count - 1, scored.start + left - start)) if scored else count - 1  # it samples a step later

    def _chunk_size(self, request: Request, plan: StepPlan, start: int) -> int:
        """The same for a prompt; a step may have to compute less of it."""
        count = min(self._token_budget(request, plan, start), self._longest)
        if not self.limits.chunked_prefill:
            return count
        room, align = max(0, self._prompt_stop - plan.num_tokens), self.kv_cache_manager.align_step_end
        end = align(request, start, start + min(count, room))
        return (align(request, start, start + count) if end == start and room else end) - start  # a run may be longer

    def _allocate(self, request: Request, plan: StepPlan, count: int) -> None:
        """Gives a running request pages for its next tokens, taking them from the last in line if there are none."""
        end = request.num_computed + count
        if missing_pages(request, end, self.kv_cache_manager.page_size):
            while missing_pages(request, end, self.kv_cache_manager.page_size) > self.pool.num_free:
                if self.kv_transfer is not None and self.kv_transfer.cancel_last_load():
                    continue
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is request:
                    return
            self.kv_cache_manager.reserve(request, end)
        self._schedule_tokens(request, plan, count)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Moves it back to the queue; its tokens are computed again, or found in the prefix cache."""
        self.running.remove(request)
        self.drop_planned(plan, request)
        plan.preempted.append(request)
        request.drop_unknown()
        self.kv_cache_manager.release(request)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.add(request)

    def drop_planned(self, plan: StepPlan, request: Request) -> None:
        """Takes a request out of a step that was not started; what it holds is to be released."""
        for page in plan.cached_pages.pop(request, ()):  # they will not be written
            self.pool.uncache(page)
        plan.drop(request)

    def _admit(self, plan: StepPlan) -> None:
        """Starts waiting requests in their order, until one has no room; some let others go ahead of them."""
        place, blocked = 0, None  # the first that waits for a slot for its adapter
        if self._lora is not None:
            self._lora.begin_plan()
        while place < len(self.waiting) and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[place]
            if request.order > self.last_order:
                place += 1
                continue
            if blocked is not None and request.lora is not None and blocked.num_overtaken >= MAX_OVERTAKEN:
                place += 1
                continue
            wait = self._start(place, plan)
            if wait is LoadState.NEEDS_PAGES:
                return
            place += wait is not LoadState.READY
            if wait is LoadState.NEEDS_SLOT:
                blocked = blocked or request
            elif wait is LoadState.READY and blocked is not None:
                blocked.num_overtaken += request.lora is not None

    def _start(self, place: int, plan: StepPlan) -> LoadState:
        """Moves a waiting request to the running ones, if it need not wait -> what it waits for."""
        request = self.waiting[place]
        wait = self._load_state(request)
        if wait is not LoadState.READY:
            return wait
        match = self.kv_cache_manager.find_prefix(request)
        count = self._chunk_size(request, plan, match.tokens)
        wait = self._blocked_by(request, plan, match, count)
        if wait is LoadState.READY:
            self.kv_cache_manager.start_from(request, match)
            del self.waiting[place]
            bisect.insort(self.running, request, key=self._key)
            self._count_admission(request, match)
            self.kv_cache_manager.reserve(request, match.tokens + count)
            self._schedule_tokens(request, plan, count)
        return wait

    def _blocked_by(self, request: Request, plan: StepPlan, match: PrefixMatch, count: int) -> LoadState:
        """Returns what a request must wait for before it computes `count` tokens after its match."""
        end, length = match.tokens + count, len(request.token_ids)
        if count <= 0 and request.wants_prompt_logprobs and plan.num_tokens < self.limits.max_num_batched_tokens:
            return LoadState.LOADING  # rows of logits are out: those behind it need fewer
        if count <= 0 or (end < length and not self._can_chunk(request)):
            return LoadState.NEEDS_PAGES
        if self._limits_partial and length - end > 1 and not self._can_start_prefill(request, plan):
            return LoadState.LOADING  # shorter ones go before it
        # with none behind it to take pages from, all of it must fit: it would stop half way and start again
        last = not self.running or self._key(request) > self._key(self.running[-1])
        return (
            LoadState.READY
            if self.kv_cache_manager.fits(request, match, end, length if last else end)
            else LoadState.NEEDS_PAGES
        )

    def _load_state(self, request: Request) -> LoadState:
        """Returns what it must wait for before it can begin: what it needs, a slot for its adapter, KV pages from the
        connector, or room."""
        if not request.ready:
            return LoadState.LOADING
        if request.lora is not None and self._lora is not None and not self._lora.acquire(request, self.running):
            return LoadState.NEEDS_SLOT
        return (
            LoadState.READY
            if self.kv_transfer is None
            else self.kv_transfer.start_load(request, alone=not self.running)
        )

    def _can_chunk(self, request: Request) -> bool:
        """True if its prompt may take several steps. One that is scored always may: its rows might never fit one."""
        return self.limits.chunked_prefill or request.wants_prompt_logprobs

    def _can_start_prefill(self, request: Request, plan: StepPlan) -> bool:
        """True if one more prompt may be partly computed after this step. With one token left, a request decodes."""
        begun = [r for r in self.running if len(r.token_ids) - r.num_computed - plan.tokens.get(r, 0) > 1]
        most, most_long = self.limits.max_partial_prefills, self.limits.max_long_prefills
        if most is not None and len(begun) >= most:
            return False
        if most_long is None or not self.limits.is_long(request):
            return True
        return sum(self.limits.is_long(r) for r in begun) < most_long

    def _count_admission(self, request: Request, match: PrefixMatch) -> None:
        if request.num_preemptions == 0:
            request.scheduled_at = request.scheduled_at or time.monotonic()
            request.num_cached = match.tokens
            fetched = min(request.num_fetched, match.tokens)
            self._num_queries += request.num_prompt
            self._num_hits += match.tokens - fetched
            self._num_fetched += fetched

    def _schedule_tokens(self, request: Request, plan: StepPlan, count: int) -> None:
        """Adds it to the plan; from now on the pages that the step fills are in the prefix cache, for this step too."""
        plan.schedule(request, count)
        if self.kv_cache_manager.row_store is not None:
            self.kv_cache_manager.row_store.hold(request, request.num_computed, request.num_computed + count)
        if self.kv_cache_manager.state_slots is not None:
            self.kv_cache_manager.state_slots.allocate_next(request)
        full = (request.num_computed + count) // self.kv_cache_manager.page_size
        if not self.pool.caching or full <= request.num_committed:
            return
        known = min(full, request.num_known // self.kv_cache_manager.page_size)
        if known < full:
            plan.late_commits.append(request)  # a hash of tokens needs the tokens
        if known > request.num_committed:
            self._commit_pages(request, plan, known)

    def _commit_pages(self, request: Request, plan: StepPlan, full: int) -> None:
        """Adds its first `full` pages to the prefix cache."""
        entered = self.kv_cache_manager.commit(request, full)
        if entered:
            plan.cached_pages.setdefault(request, []).extend(entered)
            if self.kv_transfer is not None:
                plan.new_cached_pages += [(page, self.pool.digest(page)) for page in entered]

    def mark_started(self, plan: StepPlan) -> None:
        """The step was started: its tokens count as computed."""
        for request, count in plan.tokens.items():
            start = request.num_computed
            if start < request.num_prompt:
                plan.num_prompt_tokens += min(count, request.num_prompt - start)
            request.num_computed = start + count
            if self.kv_cache_manager.state_slots is not None:
                self.kv_cache_manager.state_slots.mark_started(request)
                self.kv_cache_manager.cache_state(request)

    def reserve_sampled(self, plan: StepPlan, failed: Collection[Request] = ()) -> None:
        """The step was drawn, and the next may be planned before it has landed: requests that sample get an unknown
        token, except for those that reach their last token (no step computes it), and those that `failed`.
        """
        for request in plan.tokens:
            more = request.tokens_left > 1 and request not in failed
            if more and request.num_computed == len(request.token_ids):
                request.reserve_sampled()

    def commit_late(self, plan: StepPlan) -> None:
        """Tokens of this step have landed: pages that it fills with them can be found, too."""
        for request in plan.late_commits:
            if request in plan.tokens and _has_started(request):  # it has not ended
                full = min(request.num_computed, request.num_known) // self.kv_cache_manager.page_size
                self._commit_pages(request, plan, full)
                self.kv_cache_manager.cache_state(request)
        plan.late_commits = [r for r in plan.late_commits if r.num_drafts]  # this very step draws theirs

    def start_over(self, requests: Iterable[Request]) -> None:
        """Nothing in the cache can be relied on, and after Ctrl-C not even this bookkeeping: it is made anew. All
        requests begin again, and nothing is found of earlier ones."""
        self.kv_cache_manager.clear()
        self.running.clear()
        self.waiting = sorted(requests, key=self._key)
        for request in self.waiting:
            request.num_preemptions += _has_started(request)
            self._num_preemptions += _has_started(request)
            request.drop_unknown()
            if request.grammar is not None:
                request.grammar.reset()
            clear_cache_state(request)

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        self.kv_cache_manager.check_integrity(
            self.running, [] if self.kv_transfer is None else self.kv_transfer.held_pages
        )
        if self._lora is not None:
            self._lora.check_integrity(self.running)
        for request in self.running:
            known, tail = request.token_ids[: request.num_known], request.token_ids[request.num_known :]
            assert 0 <= request.num_computed <= len(request.token_ids), request
            assert request.num_prompt <= request.num_known == len(known) and PLACEHOLDER not in known, request
            assert (PLACEHOLDER not in tail) if request.num_drafts else (tail == [PLACEHOLDER] * len(tail)), request
            assert request.num_drafts in (0, len(tail)), request
        assert not any(request.pages for request in self.waiting), "a waiting request holds pages"
        assert not any(request.num_unknown for request in self.waiting), "a waiting request has tokens in a step"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=self._key), "a queue is out of order"


def _by_order(request: Request) -> SortKey:
    return 0, request.order


def _by_priority(request: Request) -> SortKey:
    return request.core_request.priority, request.order


def _has_started(request: Request) -> bool:
    """True if it holds pages, or a state."""
    return bool(request.pages) or request.state_slots.state != 0
