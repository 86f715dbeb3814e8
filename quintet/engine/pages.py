"""The pages of the KV cache: who holds them, and the hash chain over tokens by which they are found again.

A page is free (nobody holds it) or held by one or more requests. A full page may stand in the prefix cache under the
hash of all tokens up to its end; it keeps that hash when it becomes free, until it is taken for something else. The
free pages are a queue: the one that was released longest ago is taken first.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

DUMP = 0  # the page that padded tokens write to; never given out


class PagePool:
    """Pages 1..num_pages - 1, counted and shared."""

    def __init__(self, num_pages: int, caching: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(f"a cache needs at least 2 pages, one of them for padding, not {num_pages}")
        self.num_pages, self.caching = num_pages, caching
        self.clear()

    def clear(self) -> None:
        """Nobody holds a page, and nothing is cached, whatever stood in the books."""
        self._free: OrderedDict[int, None] = OrderedDict((page, None) for page in range(1, self.num_pages))
        self._holders = [0] * self.num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

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

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known beginning of this chain; they are not held yet."""
        found = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages that find() named."""
        for page in pages:
            if self._holders[page] == 0:
                del self._free[page]
            self._holders[page] += 1

    def take(self, count: int) -> list[int]:
        """Free pages for new tokens; what they were cached for is forgotten. The caller has checked num_free."""
        taken = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self.forget(page)
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

    def forget(self, page: int) -> None:
        """Takes a page out of the prefix cache; who holds it keeps it."""
        digest = self._hash_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def reset_cache(self) -> None:
        """Empties the prefix cache."""
        self._hash_of.clear()
        self._page_of.clear()

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Asserts that the books agree with what the requests hold."""
        holders = [0] * self.num_pages
        for pages in held:
            assert len(set(pages)) == len(pages), f"a request holds a page twice: {pages}"
            for page in pages:
                holders[page] += 1
        assert holders == self._holders, "the pool counts other holders than there are"
        assert holders[DUMP] == 0, "the dump page was given out"
        assert set(self._free) == {p for p in range(1, self.num_pages) if holders[p] == 0}, (
            "free is not what nobody holds"
        )
        assert {digest: page for page, digest in self._hash_of.items()} == self._page_of, (
            "the two cache tables disagree"
        )


def extend_chain(hashes: list[bytes], token_ids: Sequence[int], page_size: int, salt: bytes) -> None:
    """Appends the hashes of the full pages that the chain lacks: each covers its tokens and, by its parent, all before.

    128 bits of BLAKE2b: two different beginnings never meet by chance or by design. The salt is the chain's root.
    """
    for index in range(len(hashes), len(token_ids) // page_size):
        parent = hashes[index - 1] if index else hashlib.blake2b(salt, digest_size=16, person=b"quintet-root").digest()
        tokens = array("i", token_ids[index * page_size : (index + 1) * page_size])
        hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())
