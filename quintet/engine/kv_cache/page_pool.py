"""The pages of the KV cache: how many hold each, and the hash under which each is found again.

A page is free or held by one or more requests. A full page may stand in the prefix cache under the hash of all tokens
up to its end (manager.py makes it); it keeps that hash when it becomes free, until it is taken for something else. The
free pages are a queue: the one that was released longest ago is taken first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from quintet.engine.kv_cache.events import KVEventLog

NULL_PAGE = 0  # the page that padded tokens write to; never given out


class PagePool:
    """Pages 1..num_pages - 1, counted and shared."""

    def __init__(self, num_pages: int, caching: bool = True, journal: KVEventLog | None = None) -> None:
        """journal: of changes of the prefix cache, if they are published."""
        if num_pages < 2:
            raise ValueError(f"a cache needs at least 2 pages, one of them for padding, not {num_pages}")
        self.num_pages, self.caching = num_pages, caching
        self.event_log: Final = journal
        self.cache_version = 0  # how often pages left the prefix cache; what was found before may be gone
        self._free_all()

    def clear(self) -> None:
        """Frees all pages and empties the prefix cache, whatever the bookkeeping held."""
        self._free_all()
        self.cache_version += 1
        if self.event_log is not None:
            self.event_log.log_cleared()

    def _free_all(self) -> None:
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(1, self.num_pages))
        self._holders = [0] * self.num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.drafted: set[int] = set()  # pages that hold K and V of a drafter for each of their tokens

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that stand in the prefix cache, held or free."""
        return len(self._page_of)

    def has(self, digest: bytes) -> bool:
        """True if a page is cached under this hash."""
        return digest in self._page_of

    def page(self, digest: bytes) -> int:
        """The page that is; it is not held yet."""
        return self._page_of[digest]

    def digest(self, page: int) -> bytes:
        """The hash under which the page is cached; empty if it is not."""
        return self._hash_of.get(page, b"")

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which are cached."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Free pages for new tokens; what they were cached for is forgotten. The caller has checked num_free."""
        taken = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self.uncache(page)
            self.drafted.discard(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each. The end of a chain is queued before its beginning: it is worth less."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free[page] = None
                if page not in self._hash_of:
                    self._free.move_to_end(page, last=False)  # nothing to lose: take it first

    def is_free(self, page: int) -> bool:
        return self._holders[page] == 0

    def commit(self, page: int, digest: bytes) -> bool:
        """Puts a full page into the prefix cache; False if another page already stands for the same tokens."""
        if digest in self._page_of or page in self._hash_of:
            return False
        self._hash_of[page] = digest
        self._page_of[digest] = page
        return True

    def uncache(self, page: int) -> None:
        """Takes a page out of the prefix cache; requests that hold it keep it."""
        digest = self._hash_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]
            self.cache_version += 1
            if self.event_log is not None:
                self.event_log.log_removed(digest)

    def reset_cache(self) -> None:
        """Empties the prefix cache."""
        self.cache_version += 1
        self._hash_of.clear()
        self._page_of.clear()
        if self.event_log is not None:
            self.event_log.log_cleared()

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts that the counts agree with the pages that requests hold."""
        holders = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            for page in pages:
                holders[page] += 1
        assert holders == self._holders, "the pool counts other holders than there are"
        assert holders[NULL_PAGE] == 0, "the dump page was given out"
        assert set(self._free) == {p for p in range(1, self.num_pages) if holders[p] == 0}, (
            "the free list differs from the pages without holders"
        )
        assert {digest: page for page, digest in self._hash_of.items()} == self._page_of, (
            "the two cache tables disagree"
        )
