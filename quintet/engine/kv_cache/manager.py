"""The pages of requests, by group: reserved as they grow, found again by what they hold, given back behind a window.

A request holds one list of pages per group. What no later token of a group can see is 0 there, from the left. Where
layers keep a state instead (state_slots.py), a beginning counts as cached as far as both are there.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quintet.engine.kv_cache.events import KVEventLog
from quintet.engine.kv_cache.groups import KVCacheGroup
from quintet.engine.kv_cache.page_pool import NULL_PAGE, PagePool
from quintet.engine.kv_cache.state_slots import StateSlotPool
from quintet.engine.request import LAST_TOKEN, Request, StateSlots

if TYPE_CHECKING:  # it finds its pages by hashes of this module
    from quintet.engine.encoder.cache import EncoderCache
    from quintet.engine.row_store.manager import RowStoreManager

HASH_BYTES = 16  # bytes of a page's hash, before the number of its group
HasPage = Callable[[bytes], bool]


@dataclass(frozen=True)
class PrefixMatch:
    """A beginning of a request that is cached: so many tokens, and the pages of it that are needed, by group."""

    tokens: int = 0
    pages: tuple[list[int], ...] = ()
    cache_version: int = -1  # the pool's, when it was looked up
    next_hash: bytes = b""  # the hash that would have made it longer
    state_hash: bytes | None = None  # the hash of the state after them, where layers keep one
    branch: int = 0  # tokens that are cached but for a state: one is worth keeping there


@dataclass
class KVCacheManager:
    """Block tables: the pages that requests hold of one pool."""

    pool: PagePool
    page_size: int
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    max_step_tokens: int = 1  # tokens of one request in a step, at most
    state_slots: StateSlotPool | None = None  # of states, where layers keep some
    row_store: "RowStoreManager | None" = None  # rows that stand in the places of prompts' tokens
    encoder: "EncoderCache | None" = None  # rows of requests' media, which layers read
    generation: int = field(default=0, init=False)  # of what is cached; no page is found in a later one
    windows: tuple[int, ...] = field(default=(), init=False)  # groups that forget

    def __post_init__(self) -> None:
        self.windows = tuple(index for index, kept in enumerate(self.groups) if kept.window is not None)

    def _count(self, tokens: int) -> int:
        """Pages that hold so many tokens, in one group."""
        return -(-tokens // self.page_size)

    def reserve(self, request: Request, upto: int) -> None:
        """Pages for its first `upto` tokens; the caller has seen that so many are free."""
        for index, pages in enumerate(request.pages):
            need = self._count(upto) - len(pages)
            if need > 0:
                pages += self.pool.allocate(need)
                request.table_rows[index] = None

    def find_prefix(self, request: Request) -> PrefixMatch:
        """The longest beginning that is cached, but for the last token, which is computed to have logits.

        A waiting request asks in every step, and gets the earlier result as long as that is valid.
        """
        if not self.pool.caching or not (self.groups or self.state_slots) or not _can_read_cache(request):
            return PrefixMatch(pages=tuple([] for _ in self.groups))
        known, losses = request.prefix_match, self._losses
        if known is not None and known.cache_version == losses and not self.pool.has(known.next_hash):
            return known
        chain = self._chain(request, len(request.token_ids) - 1)
        branch = self._longest(chain, self.pool.has)
        count = branch if self.state_slots is None else self._met(chain, branch)
        pages = tuple(self._needed(chain, count, index) for index in range(len(self.groups)))
        following = group_hash(chain[count], 0) if count < len(chain) else b""
        state = chain[count - 1] if count and self.state_slots is not None else None
        size, waits = self.page_size, branch if self.groups else 0
        request.prefix_match = PrefixMatch(count * size, pages, losses, following, state, waits * size)
        return request.prefix_match

    @property
    def _losses(self) -> int:
        """Counts what may make a beginning shorter that was found, and, of states, longer."""
        return self.pool.cache_version + (0 if self.state_slots is None else self.state_slots.cache_version)

    def missing_hashes(self, request: Request, has: HasPage) -> list[bytes]:
        """The hashes of the pages with which a longer beginning would be cached than find() says, which `has` knows of;
        those that are cached and those that are not, in the order of their tokens. Nothing, if it would not."""
        if not self.pool.caching or not self.groups or self.state_slots is not None or not _can_read_cache(request):
            return []
        chain, here = (
            self._chain(request, len(request.token_ids) - 1),
            self.find_prefix(request).tokens // self.page_size,
        )
        count = self._longest(chain, lambda digest: self.pool.has(digest) or has(digest))
        if count <= here:
            return []
        firsts = [kept.first_visible(count * self.page_size) // self.page_size for kept in self.groups]
        return [group_hash(chain[at], i) for at in range(count) for i, first in enumerate(firsts) if at >= first]

    def prefix_hashes(self, request: Request) -> list[bytes]:
        """The hashes of the full pages that a beginning of it may be found by."""
        return self._chain(request, len(request.token_ids) - 1)

    def group_hashes(self, request: Request) -> list[bytes]:
        """The hashes of all pages that beyond() may give."""
        if not self.pool.caching or not self.groups or self.state_slots is not None or not _can_read_cache(request):
            return []
        return [
            group_hash(digest, index) for digest in self.prefix_hashes(request) for index in range(len(self.groups))
        ]

    def _longest(self, chain: Sequence[bytes], has: HasPage) -> int:
        """Pages of the longest beginning of which each group has what the next token sees."""
        count, before = len(chain), -1
        while count != before:
            before = count
            for index in range(len(self.groups)):
                count = self._covered_pages(chain, count, index, has)
        return count

    def _met(self, chain: Sequence[bytes], count: int) -> int:
        """The same, where a state after them is kept, too."""
        assert self.state_slots is not None
        before = -1
        while count != before:
            before = self.state_slots.longest_prefix(chain[:count])
            count = self._longest(chain[:before], self.pool.has)
        return count

    def _covered_pages(self, chain: Sequence[bytes], count: int, index: int, has: HasPage) -> int:
        """`count` pages or, if the group lacks one that the next token sees, those before it: no more would do. All of
        them are wanted from the left where all are seen, and from the right where a window is."""
        first = self.groups[index].first_visible(count * self.page_size) // self.page_size
        places = range(first, count) if self.groups[index].window is None else range(count - 1, first - 1, -1)
        return next((at for at in places if not has(group_hash(chain[at], index))), count)

    def _needed(self, chain: Sequence[bytes], count: int, index: int) -> list[int]:
        first = self.groups[index].first_visible(count * self.page_size) // self.page_size
        return [NULL_PAGE] * first + [self.pool.page(group_hash(chain[at], index)) for at in range(first, count)]

    def _chain(self, request: Request, tokens: int) -> list[bytes]:
        """The hashes of the full pages among its first `tokens`. The generation is part of the root."""
        if request.generation != self.generation and not request.pages and not request.num_computed:
            request.page_hashes, request.generation = [], self.generation
        known = request.num_known
        if len(request.page_hashes) < known // self.page_size:
            ids = request.token_ids[:known] if request.num_unknown else request.token_ids
            root = request.generation.to_bytes(8, "little") + request.core_request.salt
            extend_page_hashes(request.page_hashes, ids, self.page_size, root, request.core_request.beside_tokens)
        return request.page_hashes[: tokens // self.page_size]

    def fits(self, request: Request, found: PrefixMatch, upto: int, whole: int) -> bool:
        """True if a request that begins with what was found has room for its first `upto` tokens and, step by step, for
        all `whole` of them, forgetting behind windows as it goes."""
        held = sum(1 for pages in found.pages for page in pages if page != NULL_PAGE and self.pool.is_free(page))
        now, have = self._count(upto), self._count(found.tokens)
        need = 0 if self.encoder is None else self.encoder.needed_pages(request)
        for kept, pages in zip(self.groups, found.pages, strict=True):
            most = kept.max_pages(whole, self.page_size, self.max_step_tokens)
            need += max(now - have, most - sum(page != NULL_PAGE for page in pages))
        return need <= self.pool.num_free - held

    def start_from(self, request: Request, found: PrefixMatch) -> None:
        """The request begins with what was found. What it adds can be found as long as this generation lasts."""
        if request.generation != self.generation:
            request.page_hashes, request.generation = [], self.generation
        for pages in found.pages:
            self.pool.retain(page for page in pages if page != NULL_PAGE)
        if self.encoder is not None:
            self.encoder.hold(request)
        request.pages = [list(pages) for pages in found.pages]
        request.trimmed = [sum(page == NULL_PAGE for page in pages) for pages in found.pages]
        request.table_rows, request.prefix_match = [None] * len(self.groups), None
        request.num_computed, request.num_committed = found.tokens, self._count(found.tokens)
        if self.state_slots is not None:
            self.state_slots.start_from(request, found.state_hash)
            request.state_slots.branch_tokens = found.branch

    def cache_state(self, request: Request) -> None:
        """Adds its state to the prefix cache, if it ends with a page and all its tokens are known."""
        end = request.state_slots.num_state
        if self.state_slots is None or not self.pool.caching or end % self.page_size or end > request.num_known:
            return
        if request.generation == self.generation:
            self.state_slots.cache_state(request, self._chain(request, end)[-1])

    def align_step_end(self, request: Request, start: int, stop: int) -> int:
        """Returns the best end of a step that computes its tokens from `start` on, at `stop` or before: a state is kept
        where a page ends, and needed where other requests branch off, or will. Runs of tokens may have to be whole."""
        if self.row_store is not None:
            stop = self.row_store.before_runs(request, start, stop)
        within_a_page = (stop - 1) // self.page_size <= start // self.page_size
        if self.state_slots is None or not self.pool.caching or within_a_page:
            return stop
        last = (len(request.token_ids) - 1) // self.page_size * self.page_size  # the most that can be found of it
        branch = request.state_slots.branch_tokens if request.prefix_match is None else request.prefix_match.branch
        wanted = [end for end in (branch, last) if start < end < stop]
        if wanted:
            return min(wanted)
        border = stop // self.page_size * self.page_size
        return border if start < border and stop < len(request.token_ids) else stop

    def commit(self, request: Request, full: int) -> list[int]:
        """Adds its first `full` pages of each group to the prefix cache -> the pages that were added."""
        chain, entered = self._chain(request, full * self.page_size), []
        places = range(request.num_committed, full) if request.generation == self.generation else ()
        for index, pages in enumerate(request.pages):
            for at in places:
                if pages[at] != NULL_PAGE and self.pool.commit(pages[at], group_hash(chain[at], index)):
                    entered.append(pages[at])
                    if self.pool.event_log is not None:
                        log_stored(self.pool.event_log, request, group_hash(chain[at], index), at, self.page_size)
        request.num_committed = full
        return entered

    def free_out_of_window(self, request: Request) -> None:
        """Gives back the pages that no later token of their group can see."""
        for index in self.windows:
            pages, trimmed = request.pages[index], request.trimmed[index]
            seen = request.num_computed if request.transfer_params is None else self._first_needed(request)
            first = min(self.groups[index].first_visible(seen) // self.page_size, len(pages))
            if first > trimmed:
                self.pool.release(pages[trimmed:first])
                pages[trimmed:first] = [NULL_PAGE] * (first - trimmed)
                request.trimmed[index], request.table_rows[index] = first, None

    def _first_needed(self, request: Request) -> int:
        """First token to compute after the pages that it keeps: at another engine, the one after its prompt's pages."""
        assert request.transfer_params is not None
        whole = (request.num_prompt - 1) // self.page_size * self.page_size
        return min(request.num_computed, whole) if request.transfer_params.offers_pages else request.num_computed

    def release(self, request: Request) -> None:
        """Releases its pages and states."""
        for pages in request.pages:
            self.pool.release([page for page in pages if page != NULL_PAGE])
        if self.state_slots is not None:
            self.state_slots.release(request)
        if self.row_store is not None:
            self.row_store.release(request)
        if self.encoder is not None:
            self.encoder.release(request)
        clear_cache_state(request)

    def reset(self) -> None:
        """No page of today is found from now on, nor one that a running request adds to its own."""
        self.pool.reset_cache()
        if self.state_slots is not None:
            self.state_slots.reset()
        if self.row_store is not None:
            self.row_store.reset()
        self.generation += 1

    def clear(self) -> None:
        """Frees all pages and states and empties the prefix cache, whatever the bookkeeping held."""
        self.pool.clear()
        if self.state_slots is not None:
            self.state_slots.clear()
        if self.row_store is not None:
            self.row_store.clear()
        if self.encoder is not None:
            self.encoder.clear()

    def check_integrity(self, requests: Iterable[Request], others: Iterable[list[int]] = ()) -> None:
        """Asserts that the pool's counts agree with the pages of the requests, and of `others` beside them."""
        held, requests = list(others), list(requests)
        for request in requests:
            for kept, pages, trimmed in zip(self.groups, request.pages, request.trimmed, strict=True):
                assert len(pages) >= self._count(request.num_computed), request
                assert NULL_PAGE not in pages[trimmed:] and not any(pages[:trimmed]), request
                assert trimmed <= kept.first_visible(request.num_computed) // self.page_size, request
            held.append([page for pages in request.pages for page in pages if page != NULL_PAGE])
        if self.encoder is not None:
            held += self.encoder.held_pages
            self.encoder.check_integrity(requests)
        self.pool.check_integrity(held)
        if self.state_slots is not None:
            self.state_slots.check_integrity(requests)
        if self.row_store is not None:
            self.row_store.check_integrity(requests)


def missing_pages(request: Request, tokens: int, page_size: int) -> int:
    """Pages that the request lacks for its first `tokens` tokens, over all groups."""
    pages = request.pages  # all groups have as many
    return max(0, -(-tokens // page_size) - len(pages[0])) * len(pages) if pages else 0


def clear_cache_state(request: Request) -> None:
    """Drops what the request has of the KV cache, without releasing it."""
    request.pages, request.table_rows, request.trimmed, request.prefix_match = [], [], [], None
    request.draft_progress = None
    request.state_slots = StateSlots()
    request.num_computed = request.num_committed = 0
    request.asked_connector, request.num_fetched, request.num_available = False, 0, 0


def _can_read_cache(request: Request) -> bool:
    """True if cached pages of its beginning may be used: no outputs of those tokens are wanted."""
    pooling = request.core_request.pooling
    if pooling is not None:
        return request.core_request.pooled_rows == LAST_TOKEN and not pooling.skip_reading_prefix_cache
    return not request.wants_prompt_logprobs and request.core_request.alignment is None


def log_stored(journal: KVEventLog, request: Request, digest: bytes, at: int, page_size: int) -> None:
    """Logs that the request's page number `at` can be found under this hash."""
    tokens = request.token_ids[at * page_size : (at + 1) * page_size]
    journal.log_stored(digest, request.page_hashes[at - 1] if at else None, tokens, request.core_request.lora)


def group_hash(digest: bytes, index: int) -> bytes:
    """The hash of a page of the index-th group."""
    return digest + index.to_bytes(2, "little") if index else digest


def extend_page_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    page_size: int,
    salt: bytes,
    beside: Callable[[int, int], bytes | memoryview] = lambda start, stop: b"",
) -> None:
    """Appends the hashes of the full pages that the chain lacks: each covers its tokens and, by its parent, all before.

    128 bits of BLAKE2b: two different beginnings never meet by chance or by design. The salt is the chain's root.
    `beside(start, stop)` is what else tells those tokens from others, such as embeddings in their places: a page with
    any hashes more bytes than a page with none.
    """
    for index in range(len(hashes), len(token_ids) // page_size):
        parent = (
            hashes[index - 1]
            if index
            else hashlib.blake2b(salt, digest_size=HASH_BYTES, person=b"quintet-root").digest()
        )
        tokens = array("i", token_ids[index * page_size : (index + 1) * page_size])
        digest = hashlib.blake2b(parent + tokens.tobytes(), digest_size=HASH_BYTES)
        digest.update(beside(index * page_size, (index + 1) * page_size))
        hashes.append(digest.digest())
