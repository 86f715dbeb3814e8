"""Bookkeeping of pages that hold an encoder's rows: which media they are of, and for which requests. No tensors.

The pages are of the KV cache's pool, in the group of layers that read them. A request takes those of its media when it
starts, all at once, and holds them until it ends or is preempted. They stand in the prefix cache from then on: a later
request with the same media (another prompt, another temperature, one of several completions) finds them, and the
encoder does not run again. The pass that writes them is planned with the first step that reads them.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quintet.engine.encoder.writing import write_encoded
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.engine.observability.stats import EncoderStats
from quintet.engine.row_store.items import RowWrite, RowWriter
from quintet.interface.types import IntArray
from quintet.media.items import MediaItem

if TYPE_CHECKING:
    from quintet.engine.request import Request

KEY_BYTES = 16  # of BLAKE2b: two different items never meet by chance or by design


@dataclass(eq=False)
class EncoderItem:
    """Media of one request, as a pass of the encoder takes it."""

    media: MediaItem
    key: bytes  # of the media and the tenant: items with equal keys have equal rows
    count: int  # rows
    writer: RowWriter = write_encoded


@dataclass
class EncodedPages:
    """Pages of a request's media, which it holds while it runs."""

    item: EncoderItem
    pages: list[int]
    table: IntArray  # the same, as batches have them


class EncoderCache:
    """Pages of an encoder's rows, found by the media's digest."""

    def __init__(self, pool: PagePool, group: int, rows: int, page_size: int) -> None:
        """group: of the layers that read them. rows: of one item, at most."""
        self.pool, self.rows = pool, rows
        self.num_passes = 0  # that were planned, since the start
        self.num_hits = 0  # requests that started and found their rows
        self._group, self._page_size = group, page_size
        self._holders: dict[Request, EncodedPages] = {}
        self._writes: dict[bytes, RowWrite] = {}  # passes that are planned and have not run

    def begin_plan(self, writes: dict[bytes, RowWrite]) -> None:
        """Begins the plan of a step, which runs the passes that this dict gets, and then clears it."""
        writes |= self._writes  # of a plan that was not started
        self._writes = writes

    def needed_pages(self, request: "Request") -> int:
        """Returns how many free pages the request would take: new ones, or those that were kept for others."""
        if request in self._holders:
            return 0
        item = self._item(request)
        pages = self._found(item)
        return self._num_pages(item) if pages is None else sum(map(self.pool.is_free, pages))

    def hold(self, request: "Request") -> None:
        """The request starts: it takes the pages of its media, and plans the pass if they hold nothing yet.

        The caller has seen that so many pages are free, and has retained the request's other pages.
        """
        item = self._item(request)
        pages = self._found(item)
        if pages is None:
            pages = self._allocate(item)
        else:
            self.num_hits += 1
            self.pool.retain(pages)
        request.encoded = self._holders[request] = EncodedPages(item, pages, np.array(pages, np.int32))

    def release(self, request: "Request") -> None:
        """Lets go of a request's pages; a pass for it alone that has not run is not run."""
        held = self._holders.pop(request, None)
        if held is None:
            return
        request.encoded = None
        self.pool.release(held.pages)
        if self._write_key(held) in self._writes and self.pool.is_free(held.pages[0]):
            del self._writes[self._write_key(held)]
            self.num_passes -= 1
            for page in held.pages:
                self.pool.uncache(page)

    def stats(self) -> EncoderStats:
        """Returns counters since the start."""
        return EncoderStats(self.num_passes, self.num_hits)

    def clear(self) -> None:
        """Forgets all pages: the pool is cleared, too."""
        for request in self._holders:
            request.encoded = None
        self._holders.clear()
        self._writes.clear()

    @property
    def held_pages(self) -> Iterable[list[int]]:
        """Pages of each request that runs."""
        return [held.pages for held in self._holders.values()]

    def check_integrity(self, requests: Iterable["Request"]) -> None:
        """Asserts that all running requests hold their media's pages, and no others do."""
        assert set(requests) == set(self._holders), "other requests hold an encoder's rows than those that run"
        whole = all(len(held.pages) == self._num_pages(held.item) for held in self._holders.values())
        assert whole, "an item lacks pages"
        assert self._writes.keys() <= set(map(self._write_key, self._holders.values())), "a pass is of no request"

    def _item(self, request: "Request") -> EncoderItem:
        """Returns what the encoder takes of a request: media whose rows are counted, or that have all rows."""
        media = request.core_request.encoder
        assert media is not None and media.count <= self.rows, "admission refuses requests without media, and long ones"
        return EncoderItem(media, _key(request), media.count or self.rows)

    def _num_pages(self, item: EncoderItem) -> int:
        return -(-item.count // self._page_size)

    def _found(self, item: EncoderItem) -> list[int] | None:
        """Returns the pages that hold the item; None if not all of it is there."""
        hashes = self._hashes(item)
        return [self.pool.page(each) for each in hashes] if all(map(self.pool.has, hashes)) else None

    def _hashes(self, item: EncoderItem) -> list[bytes]:
        """Hashes of its pages: longer than those of tokens' pages."""
        suffix = self._group.to_bytes(2, "little")
        return [item.key + index.to_bytes(4, "little") + suffix for index in range(self._num_pages(item))]

    def _allocate(self, item: EncoderItem) -> list[int]:
        """Takes pages for an item that is not there, and plans its pass."""
        pages = self.pool.allocate(self._num_pages(item))
        for page, digest in zip(pages, self._hashes(item), strict=True):
            if self.pool.has(digest):  # the rest of it was given to others
                self.pool.uncache(self.pool.page(digest))
            self.pool.commit(page, digest)  # whether or not prefixes are cached: n completions are of one pass
        within = np.arange(self._page_size, dtype=np.int32)
        slots = (np.array(pages, np.int32)[:, None] * self._page_size + within).reshape(-1)[: item.count]
        write = RowWrite(item, slots)
        self._writes[_write_key(item, pages)] = write
        self.num_passes += 1
        return pages

    @staticmethod
    def _write_key(held: EncodedPages) -> bytes:
        return _write_key(held.item, held.pages)


def _write_key(item: EncoderItem, pages: list[int]) -> bytes:
    """Returns the name of a pass: the same media may be written twice where a reset came between."""
    return b"encoder" + item.key + pages[0].to_bytes(8, "little")


def _key(request: "Request") -> bytes:
    """Returns the key of a request's media: its salt has the media's digest in it, and keeps tenants apart."""
    return hashlib.blake2b(request.core_request.salt, digest_size=KEY_BYTES, person=b"quintet-encoder").digest()
