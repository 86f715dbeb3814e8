"""Items of the row store: stretches of a prompt's tokens, and the rows that stand in their places."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quintet.engine.row_store.writing import write_embeds
from quintet.interface.types import IntArray
from quintet.layers.row_store import PAGE_ROWS

if TYPE_CHECKING:
    from quintet.engine.executor.worker_group import WorkerGroup
    from quintet.engine.request import CoreRequest

KEY_BYTES = 16  # of BLAKE2b: two different items never meet by chance or by design
# most rows of an item that is cut out of prompt embeddings: it is hashed and written at once, and a request holds all
# of it until it has computed the last
EMBEDS_ROWS = 64

RowWriter = Callable[["WorkerGroup", Sequence["RowWrite"]], None]  # makes rows, and writes them on every rank


class Written(Protocol):
    """Rows that are written before a step reads them: of a store, or of an encoder's pages."""

    @property
    def count(self) -> int:
        """Rows."""

    @property
    def writer(self) -> RowWriter:
        """Makes its rows."""

    @property
    def key(self) -> bytes:
        """Digest of what the rows are made of: items with equal keys have equal rows."""


class RowItem(Written, Protocol):
    """Rows in the places of one stretch of a prompt: found again by their key, made by their writer."""

    @property
    def first(self) -> int:
        """Position of the first token."""

    @property
    def stop(self) -> int:
        """Position after the last token."""

    @property
    def attends_ahead(self) -> bool:
        """True if its tokens see one another, where a family's do."""

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (position, tokens, first row) of each run of its tokens among start .. stop - 1."""


class RowWrite(NamedTuple):
    """An item that is to be written."""

    item: Written
    places: IntArray  # [count] rows of the store


@dataclass(eq=False)
class EmbedsItem:
    """A stretch of prompt embeddings."""

    first: int
    count: int
    content: memoryview  # float32, row by row
    attends_ahead: bool = True
    writer: RowWriter = write_embeds

    @property
    def stop(self) -> int:
        return self.first + self.count

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        low, high = max(start, self.first), min(stop, self.stop)
        if low < high:
            yield low, high - low, low - self.first

    @cached_property
    def key(self) -> bytes:
        shape = self.count.to_bytes(4, "little")
        return hashlib.blake2b(self.content, digest_size=KEY_BYTES, salt=shape, person=b"quintet-embeds").digest()


def embeds_items(core_request: "CoreRequest", most: int) -> list[EmbedsItem]:
    """Cuts a prompt of embeddings into items of at most `most` rows."""
    count = len(core_request.prompt_ids)
    bounds = ((first, min(first + most, count)) for first in range(0, count, most))
    return [EmbedsItem(first, stop - first, core_request.embeds_of(first, stop)) for first, stop in bounds]


@dataclass(eq=False)
class PromptRows:
    """Items of one prompt, in order and apart, and the pages of the store that its request holds."""

    items: Sequence[RowItem]
    pages: dict[int, list[int]] = field(default_factory=dict)  # number of an item -> its pages
    _firsts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._firsts = [item.first for item in self.items]

    def touched(self, start: int, stop: int) -> Iterator[tuple[int, RowItem]]:
        """Yields the items with tokens among start .. stop - 1, with their numbers."""
        for index in range(max(0, bisect_right(self._firsts, start) - 1), len(self.items)):
            item = self.items[index]
            if item.first >= stop:
                return
            if item.stop > start:
                yield index, item

    def places(self, start: int, stop: int) -> IntArray:
        """Returns the row of the store for each of these tokens, -1 for one without; their items are held."""
        found = np.full(stop - start, -1, np.int32)
        for index, item in self.touched(start, stop):
            rows = rows_of(self.pages[index])
            for first, count, row in item.runs(start, stop):
                found[first - start : first - start + count] = rows[row : row + count]
        return found


def rows_of(pages: Sequence[int]) -> IntArray:
    """Returns the rows of these pages."""
    within = np.arange(PAGE_ROWS, dtype=np.int32)
    return (np.array(pages, np.int32)[:, None] * PAGE_ROWS + within).reshape(-1)


def pages_of(item: RowItem) -> int:
    """Pages that the item takes."""
    return -(-item.count // PAGE_ROWS)
