"""Who runs next: hands each request a number of tokens out of one budget. Plain data; no device, no tensors.

Prefill, chunked prefill and decode are the same thing, a stretch num_computed : num_computed + n of a request's
tokens. A request is waiting or running; a running one holds the pages of its computed tokens.

A step may be planned while the one before it runs: expect() then leaves places for the tokens that are not known yet.
A device runs steps in the order in which they were started, so a page that goes from one request to another is written
by a later step after every earlier one; nobody has to wait for it.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quintet.engine.pages import PagePool, extend_chain
from quintet.engine.request import UNKNOWN, Request

Key = tuple[int, int]


@dataclass(frozen=True)
class Limits:
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_logit_rows: int  # tokens whose logits are computed
    page_size: int
    chunked: bool = True
    by_priority: bool = False


@dataclass
class Plan:
    """One step: how many tokens each request computes, in the order of the batch."""

    tokens: dict[Request, int] = field(default_factory=dict)
    committed: dict[Request, list[int]] = field(default_factory=dict)  # pages that entered the prefix cache for it
    late: list[Request] = field(default_factory=list)  # who fill a page with a token that is not known yet
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0  # of them; counted when the step was started
    num_rows: int = 0  # of logits: of requests that sample, and of prompt tokens that are scored

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def enter(self, request: Request, count: int) -> None:
        self.tokens[request] = count
        self.num_tokens += count
        self.num_rows += request.num_rows(request.num_computed, count)

    def preempt(self, request: Request) -> None:
        count = self.tokens.pop(request, 0)
        self.num_tokens -= count
        self.num_rows -= request.num_rows(request.num_computed, count) if count else 0
        self.preempted.append(request)


class Scheduler:
    """Two ordered lists and a pool of pages."""

    def __init__(self, limits: Limits, pool: PagePool) -> None:
        self.limits, self.pool = limits, pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_queries = 0  # tokens looked up in the prefix cache, and found there
        self.num_hits = 0
        self.num_preemptions = 0
        self._key: Callable[[Request], Key] = _by_priority if limits.by_priority else _by_order

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands, and frees its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:  # in neither, if Ctrl-C came while it was added
                queue.remove(request)
                break
        self._free(request)

    def schedule(self) -> Plan:
        """Decodes first, then prefills that have begun, then those that wait, as far as budget and pages go."""
        plan = Plan()
        decodes = [r for r in self.running if len(r.token_ids) - r.num_computed == 1]
        prefills = [r for r in self.running if len(r.token_ids) - r.num_computed != 1]
        for request in (*decodes, *prefills):
            if plan.preempted and request not in self.running:
                continue
            count = self._share(request, plan, request.num_computed)
            if count > 0:
                self._grow(request, plan, count)
        if not plan.preempted:
            self._admit(plan)
        return plan

    def has_room(self) -> bool:
        """Whether the running requests find pages for their next tokens without taking them from one another."""
        most, free = self.limits.max_num_batched_tokens, self.pool.num_free
        if free >= len(self.running) + most // self.limits.page_size:  # each begins one page, and fills others
            return True
        ends = [(min(len(r.token_ids), r.num_computed + most), len(r.page_ids)) for r in self.running]
        return sum(max(0, self._pages_for(end) - held) for end, held in ends) <= free

    def _share(self, request: Request, plan: Plan, start: int) -> int:
        """Tokens from `start` on that the step has room for: within its budget, and that of rows of logits.

        Rows are never short for decodes: they come first, and there are rows for max_num_seqs of them.
        """
        count = min(self.limits.max_num_batched_tokens - plan.num_tokens, len(request.token_ids) - start)
        left = self.limits.max_logit_rows - plan.num_rows
        if count <= 0 or request.num_rows(start, count) <= left:
            return count
        scored = request.scored(start, count)
        return max(0, min(count - 1, scored.start + left - start)) if scored else count - 1  # it samples a step later

    def _grow(self, request: Request, plan: Plan, count: int) -> None:
        """Gives a running request pages for its next tokens, taking them from the last in line if there are none."""
        need = self._pages_for(request.num_computed + count) - len(request.page_ids)
        while need > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return
        if need > 0:
            request.page_ids += self.pool.take(need)
            request.page_row = None
        self._enter(request, plan, count)

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Back to the queue; what it had computed is computed again, or found in the prefix cache."""
        self.running.remove(request)
        for page in plan.committed.pop(request, ()):  # it was in this step already: they will not be written
            self.pool.forget(page)
        plan.preempt(request)
        self._free(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def _admit(self, plan: Plan) -> None:
        for request in list(self.waiting):
            if len(self.running) >= self.limits.max_num_seqs:
                break
            if not request.ready:
                continue
            found = self._cached(request)
            start = len(found) * self.limits.page_size
            count = self._share(request, plan, start)
            if count <= 0 and request.wants_scores and plan.num_tokens < self.limits.max_num_batched_tokens:
                continue  # rows of logits are out: those behind it need fewer
            if count <= 0 or (count < len(request.token_ids) - start and not self._may_cut(request)):
                break
            need = self._pages_for(start + count) - len(found)
            # with nobody behind it to take pages from, all of it must fit: it would stop half way and start again
            last = not self.running or self._key(request) > self._key(self.running[-1])
            whole = self._pages_for(len(request.token_ids)) - len(found) if last else need
            if whole > self.pool.num_free - sum(1 for page in found if self.pool.is_free(page)):
                break
            self.pool.hold(found)
            self.waiting.remove(request)
            bisect.insort(self.running, request, key=self._key)
            self._begin(request, found)
            request.page_ids += self.pool.take(need)
            self._enter(request, plan, count)

    def _may_cut(self, request: Request) -> bool:
        """Whether its prompt may take several steps. One that is scored always may: its rows might never fit one."""
        return self.limits.chunked or request.wants_scores

    def _begin(self, request: Request, found: list[int]) -> None:
        request.page_ids = found
        request.num_computed = len(found) * self.limits.page_size
        request.num_committed = len(found)
        if request.num_preemptions == 0:
            request.num_cached = request.num_computed
            self.num_queries += request.num_prompt
            self.num_hits += request.num_cached

    def _cached(self, request: Request) -> list[int]:
        """Pages of its beginning that are in the cache; at least its last token is left to compute."""
        if not self.pool.caching or request.wants_scores:
            return []
        size = self.limits.page_size
        extend_chain(request.page_hashes, request.token_ids, size, request.admitted.salt)
        return self.pool.find(request.page_hashes[: (len(request.token_ids) - 1) // size])

    def _enter(self, request: Request, plan: Plan, count: int) -> None:
        """Into the plan; the pages that the step fills can be found from now on, by this very step too."""
        plan.enter(request, count)
        full = (request.num_computed + count) // self.limits.page_size
        if not self.pool.caching or full <= request.num_committed:
            return
        if full * self.limits.page_size > request.num_known:
            plan.late.append(request)  # a hash of tokens needs the tokens
        else:
            self._commit(request, plan, full)

    def _commit(self, request: Request, plan: Plan, full: int) -> None:
        """Its first `full` pages can be found."""
        size = self.limits.page_size
        known = request.token_ids[: full * size] if request.num_unknown else request.token_ids
        extend_chain(request.page_hashes, known, size, request.admitted.salt)
        for index in range(request.num_committed, full):
            if self.pool.commit(request.page_ids[index], request.page_hashes[index]):
                plan.committed.setdefault(request, []).append(request.page_ids[index])
        request.num_committed = full

    def advance(self, plan: Plan) -> None:
        """The step was started: its tokens count as computed."""
        for request, count in plan.tokens.items():
            start = request.num_computed
            if start < request.num_prompt:
                plan.num_prompt_tokens += min(count, request.num_prompt - start)
            request.num_computed = start + count

    def expect(self, plan: Plan) -> None:
        """The step was drawn, and the next may be planned before it has landed: who samples is one token longer by
        then, but for those whose last token it is. On that one nothing is computed."""
        for request in plan.tokens:
            if request.num_computed == len(request.token_ids) and request.tokens_left > 1:
                request.expect()

    def commit_late(self, plan: Plan) -> None:
        """The step before this one has landed: pages that this one fills with what it sampled can be found, too."""
        for request in plan.late:
            if request in plan.tokens:  # it has not ended
                self._commit(request, plan, request.num_computed // self.limits.page_size)
        plan.late.clear()

    def start_over(self, requests: Iterable[Request]) -> None:
        """Nothing in the cache can be relied on, and after Ctrl-C not even these books: they are written anew. All
        requests begin again, and nothing is found of earlier ones."""
        self.pool.clear()
        self.running.clear()
        self.waiting = sorted(requests, key=self._key)
        for request in self.waiting:
            begun = bool(request.page_ids)
            request.num_preemptions += begun
            self.num_preemptions += begun
            request.forget_unknown()
            self._forget_pages(request)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_size)

    def _free(self, request: Request) -> None:
        self.pool.release(request.page_ids)
        self._forget_pages(request)

    def _forget_pages(self, request: Request) -> None:
        request.page_ids, request.page_row = [], None
        request.num_computed = request.num_committed = 0

    def check_integrity(self) -> None:
        """Asserts what must hold between steps."""
        self.pool.check_integrity([request.page_ids for request in self.running])
        for request in self.running:
            assert 0 <= request.num_computed <= len(request.token_ids), request
            assert len(request.page_ids) >= self._pages_for(request.num_computed), request
            tail = request.token_ids[request.num_known :]
            assert tail == [UNKNOWN] * request.num_unknown and request.token_ids.count(UNKNOWN) == len(tail), request
        assert not any(request.page_ids for request in self.waiting), "a waiting request holds pages"
        assert not any(request.num_unknown for request in self.waiting), "a waiting request has tokens in a step"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=self._key), "a queue is out of order"


def _by_order(request: Request) -> Key:
    return 0, request.order


def _by_priority(request: Request) -> Key:
    return request.admitted.priority, request.order
