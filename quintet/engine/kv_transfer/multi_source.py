"""Several sources of pages as one: a page is loaded from the first that has it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quintet.engine.kv_transfer.connector import Load, LoadedPages


class PageSource(NamedTuple):
    """Source of pages of one request, by their hashes in the cache."""

    has: Callable[[bytes], bool]
    load: Callable[[Sequence[bytes]], Load]


def first_of(first: PageSource, second: PageSource) -> PageSource:
    """Joins two sources; the second is not asked for pages that the first has."""

    def load(digests: Sequence[bytes]) -> Load:
        parts = []
        here = [place for place, digest in enumerate(digests) if first.has(digest)]
        there = sorted(set(range(len(digests))).difference(here))
        for source, places in ((first, here), (second, there)):
            if places:
                parts.append((source.load([digests[place] for place in places]), places))
        return parts[0][0] if len(parts) == 1 else MultiLoad(parts)

    return PageSource(lambda digest: first.has(digest) or second.has(digest), load)


class MultiLoad(Load):
    """Several loads as one, each with the places of its keys among all keys."""

    def __init__(self, parts: Sequence[tuple[Load, list[int]]]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        return all(load.done for load, _ in self._parts)

    def take(self, most: int) -> LoadedPages:
        places, rows, failed = list[int](), [], dict[int, str]()
        for load, own in self._parts:
            if not load.done:
                came = load.take(most - len(places))
                places += [own[place] for place in came.indices]
                rows += [came.rows] if came.indices else []  # empty rows have no width
                failed.update({own[place]: why for place, why in came.failed.items()})
        return LoadedPages(places, np.concatenate(rows) if rows else np.zeros((0, 0), np.int32), failed)

    def cancel(self) -> None:
        for load, _ in self._parts:
            load.cancel()
