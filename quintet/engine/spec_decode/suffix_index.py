"""Index of texts: finds where the last tokens of a text stood before, and what followed there.

Texts lie one behind the other in a ring of tokens: the newest overwrite the oldest, so that memory is bounded. Three
hash tables, of the last 5, 2 and 1 tokens, lead to the newest places with these tokens; a lookup takes the same time
however many texts there are. csrc/common/suffix_index.cpp computes the same, a hundred times as fast.
"""

from itertools import pairwise
from typing import Protocol

import numpy as np

from quintet.interface.types import IntArray

GRAMS = (5, 2, 1)  # last tokens that a hash is of; the longer first
MAX_MATCHES = 32  # newest ones that vote
MAX_VISITED = 96  # places that are looked at, for each hash
MAX_POSITION = 2**31
SEPARATOR = -1
_MASK = 2**64 - 1

Draft = tuple[list[int], float, int]  # tokens; the sum of their shares; last tokens that stood there before


class SuffixIndex(Protocol):
    """Texts of owners. The owner of a text is a number from 0 on; a lookup finds texts of its owner only."""

    @property
    def position(self) -> int:
        """Tokens that were appended, and a separator behind each text."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes at most; memory that was never written may not be there."""
        ...

    def append(self, ids: IntArray, owner: int, ends: bool) -> None:
        """Appends ids [T] int32 to the open text; with `ends`, the next ones begin another."""
        ...

    def forget_before(self, position: int) -> None:
        """Finds no tokens before a position any more."""
        ...

    def lookup(self, ids: IntArray, owner: int, most: int, factor: float, share: float, depth: int) -> Draft:
        """Returns the draft after ids [T] int32 with the highest expected number of right tokens.

        For each length L of the last tokens that stood in a text before, the newest matches vote: the draft goes on
        with the most frequent next token (of equally frequent ones, that of the newest match), as long as the share of
        the matches that go on with the whole draft is at least `share`. It has at most `most`, L x `factor` and
        `depth` - L tokens. Of drafts with equal sums of shares, that of the longest L is returned; with it, how many
        of the last tokens all of its matches share."""
        ...


class NativeSuffixIndex:
    """SuffixIndex of quintet._cpu."""

    def __init__(self, capacity: int) -> None:
        from quintet import _cpu

        self._index = _cpu.SuffixIndex(capacity)

    @property
    def position(self) -> int:
        return int(self._index.position)

    @property
    def num_bytes(self) -> int:
        return int(self._index.num_bytes)

    def append(self, ids: IntArray, owner: int, ends: bool) -> None:
        ids = np.ascontiguousarray(ids, np.int32)
        self._index.append(ids.ctypes.data, len(ids), owner, ends)

    def forget_before(self, position: int) -> None:
        self._index.forget_before(position)

    def lookup(self, ids: IntArray, owner: int, most: int, factor: float, share: float, depth: int) -> Draft:
        ids = np.ascontiguousarray(ids[-depth:], np.int32)
        draft: Draft = self._index.lookup(ids.ctypes.data, len(ids), owner, most, factor, share, depth)
        return draft


class PythonSuffixIndex:
    """SuffixIndex without the extension."""

    def __init__(self, capacity: int) -> None:
        if not 16 <= capacity <= 2**28:
            raise ValueError(f"capacity must be 16 to 2^28 tokens, not {capacity}")
        self._capacity, self._mask = capacity, 7
        while 2 * (self._mask + 1) < capacity:
            self._mask = 2 * self._mask + 1
        self._tokens = np.zeros(capacity, np.int32)
        self._owners = np.zeros(capacity, np.uint32)
        self._before = [np.zeros(capacity, np.uint32) for _ in GRAMS]  # position + 1 of the same hash; 0: none
        self._newest = [np.zeros(self._mask + 1, np.uint32) for _ in GRAMS]  # by hash
        self._next = self._forgotten = self._run = 0

    @property
    def position(self) -> int:
        return self._next

    @property
    def num_bytes(self) -> int:
        return 4 * ((2 + len(GRAMS)) * self._capacity + len(GRAMS) * (self._mask + 1))

    def append(self, ids: IntArray, owner: int, ends: bool) -> None:
        tokens = ids.tolist()
        if self._next + len(tokens) + 1 >= MAX_POSITION:
            raise ValueError("the index has no positions left; make another")
        if any(token < 0 for token in tokens):
            raise ValueError("token ids must be 0 or more")
        for token in tokens:
            self._run += 1
            self._put(token, owner)
        if ends:
            self._run = 0
            self._put(SEPARATOR, owner)

    def forget_before(self, position: int) -> None:
        self._forgotten = max(self._forgotten, min(position, self._next))

    def _put(self, token: int, owner: int) -> None:
        position, size = self._next, self._capacity
        slot = position % size
        self._tokens[slot], self._owners[slot] = token, owner
        self._next += 1
        for gram, before, newest in zip(GRAMS, self._before, self._newest, strict=True):
            before[slot] = 0
            if self._run >= gram:
                last = [int(self._tokens[at % size]) for at in range(position - gram + 1, position + 1)]
                bucket = _hash(owner, last) & self._mask
                before[slot], newest[bucket] = newest[bucket], position + 1

    def lookup(self, ids: IntArray, owner: int, most: int, factor: float, share: float, depth: int) -> Draft:
        query: list[int] = ids[-(depth - 1) :].tolist()
        matches = self._matches(query, owner)
        best: Draft = [], 0.0, 0
        lengths = sorted({0, *(length for _, length in matches)}, reverse=True)
        for longest, next_longest in pairwise(lengths):
            # shorter lengths down to the next longest match the same places
            limits = (
                min(int(min(length * factor + 1e-6, depth)), depth - length)
                for length in range(longest, next_longest, -1)
            )
            places = [end + 1 for end, size in matches if size >= longest]
            draft = self._vote(places, longest, min(most, max(limits)), share)
            if draft[1] > best[1]:
                best = draft
        return best

    def _matches(self, query: list[int], owner: int) -> list[tuple[int, int]]:
        """Returns the last positions of matches, and their lengths."""
        found: list[tuple[int, int]] = []
        first, size = max(self._forgotten, self._next - self._capacity), self._capacity
        for level, gram in enumerate(GRAMS):
            if len(query) < gram:
                continue
            at = int(self._newest[level][_hash(owner, query[-gram:]) & self._mask])
            for _ in range(MAX_VISITED):
                end = at - 1
                if end < first or len(found) == MAX_MATCHES:
                    break
                at = int(self._before[level][end % size])
                if end + 1 >= self._next or self._owners[end % size] != owner:
                    continue
                length = 0
                while length < len(query) and end - length >= first:
                    if self._tokens[(end - length) % size] != query[-1 - length]:
                        break
                    length += 1
                if length >= gram and (level == 0 or length < GRAMS[level - 1]):
                    found.append((end, length))
        return found

    def _vote(self, places: list[int], length: int, most: int, share: float) -> Draft:
        draft, score, probability = list[int](), 0.0, 1.0
        while len(draft) < most:
            nexts = [self._token(place) for place in places]
            counts: dict[int, int] = {}
            for token in nexts:
                if token != SEPARATOR:
                    counts[token] = counts.get(token, 0) + 1
            if not counts:
                break
            best = max(counts, key=lambda token: counts[token])  # the first of several
            probability *= counts[best] / len(places)
            if probability < share:
                break
            draft.append(best)
            score += probability
            places = [place + 1 for place, token in zip(places, nexts, strict=True) if token == best]
        return draft, score, length

    def _token(self, position: int) -> int:
        return int(self._tokens[position % self._capacity]) if position < self._next else SEPARATOR


def _hash(owner: int, tokens: list[int]) -> int:
    hashed = 0
    for value in (owner, *tokens):
        hashed = (hashed ^ value) * 0xFF51AFD7ED558CCD & _MASK
        hashed ^= hashed >> 32
    return hashed


def make_suffix_index(capacity: int) -> SuffixIndex:
    """Returns an index of `capacity` tokens, separators included: 16 to 2^28."""
    try:
        return NativeSuffixIndex(capacity)
    except (ImportError, AttributeError):  # not built, or older than this module
        return PythonSuffixIndex(capacity)
