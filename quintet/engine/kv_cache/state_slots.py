"""The states of requests: where each is read and written in a step, and which are kept for the prefix cache.

A state is of fixed size and holds all tokens before some position; it lies in a slot, out of a pool of its own. A step
reads one slot and writes another, so that it may be run again, taken back, or go on from what others keep:

    before  <- drafts refused -  state  - the next step ->  following
    num_before tokens            num_state tokens

Slots 1..num_slots - 1 are given out; a request holds two at most, three while its drafts are checked. A slot that is
kept in the prefix cache is never written while it is held.

Where layers can (StateSpec.max_drafts), there is no `before`: a slot holds the state before the drafts of the step that
wrote it, and what each draft does to it, which the next step does first for those that were accepted:

    num_state <= num_computed <= num_state + max_drafts
"""

from collections.abc import Iterable, Sequence

from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.request import Request, StateSlots

SLOTS_PER_REQUEST = 2  # slots of a running request: one that the step reads, and one that it writes


class StateSlotPool:
    """The pool of one engine, counted and shared. Slot 0 stands for a beginning where it is read, and takes the writes
    of padding."""

    def __init__(self, num_slots: int, caching: bool = True, max_drafts: int = 0) -> None:
        """max_drafts: of a request in a step, that slots keep apart from the state."""
        self._pool, self.max_drafts = PagePool(num_slots, caching), max_drafts
        self.num_changes = 0  # how often what can be found has changed, beside losses

    @property
    def cache_version(self) -> int:
        """Counts every change of what can be found."""
        return self._pool.cache_version + self.num_changes

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    def longest_prefix(self, digests: Sequence[bytes]) -> int:
        """Number of pages of a chain that the longest kept state covers."""
        return next((count for count in range(len(digests), 0, -1) if self._pool.has(digests[count - 1])), 0)

    def start_from(self, request: Request, digest: bytes | None) -> None:
        """The request goes on from the state under this hash, which is there; None: it begins."""
        if digest is not None:
            request.state_slots.state, request.state_slots.num_state = self._pool.page(digest), request.num_computed
            self._pool.retain([request.state_slots.state])

    def allocate_next(self, request: Request) -> None:
        """A slot for the state after its next step. There is one: no more requests run than twice that have room."""
        (request.state_slots.next_state,) = self._pool.allocate(1)

    def mark_started(self, request: Request) -> None:
        """The step was started, and its tokens count as computed. What it read is kept while drafts may be refused."""
        slots = request.state_slots
        if request.num_drafts and not self.max_drafts:
            slots.previous, slots.num_previous = slots.state, slots.num_state
        else:
            self._release(slots.state)
        slots.state, slots.next_state, slots.num_state = slots.next_state, 0, request.num_computed
        if self.max_drafts:
            slots.num_state -= request.num_drafts

    def drop_rejected(self, request: Request) -> None:
        """Its drafts were checked, and what counts as computed is known: a state that holds more is given back, and its
        accepted tokens are computed again from the one before. One that keeps them apart stays."""
        slots = request.state_slots
        if self.max_drafts:
            return
        if request.num_computed == slots.num_state:
            self._release(slots.previous)
        else:
            self._release(slots.state)
            slots.state, slots.num_state = slots.previous, slots.num_previous
            request.num_computed = slots.num_state
        slots.previous = 0

    def cache_state(self, request: Request, digest: bytes) -> None:
        """Its state, which no later step changes, can be found from now on, by later steps. Of an output the latest is
        kept alone: the next prompt of a conversation holds all of it."""
        if self._pool.commit(request.state_slots.state, digest):
            self.num_changes += 1
            if request.state_slots.num_state > request.num_prompt:
                if self._pool.has(request.state_slots.last_hash):
                    self._pool.uncache(self._pool.page(request.state_slots.last_hash))
                request.state_slots.last_hash = digest

    def release(self, request: Request) -> None:
        """Releases its slots."""
        for slot in request.state_slots.held:
            self._release(slot)
        self.clear_slots(request)

    def clear_slots(self, request: Request) -> None:
        """Drops its slots without releasing them."""
        request.state_slots = StateSlots()

    def reset(self) -> None:
        """Empties the prefix cache of states."""
        self._pool.reset_cache()

    def clear(self) -> None:
        self._pool.clear()

    def _release(self, slot: int) -> None:
        if slot:
            self._pool.release([slot])

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that the counts agree with the slots that requests hold."""
        held = []
        for request in requests:
            slots = request.state_slots
            assert (slots.state != 0) == (request.num_computed > 0), request
            assert 0 <= request.num_computed - slots.num_state <= self.max_drafts, request
            assert not slots.next_state, "a slot was taken for a step that is not planned"
            assert not slots.previous or request.num_drafts, request
            held.append(slots.held)
        self._pool.check_integrity(held)
