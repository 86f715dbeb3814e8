"""The contract of a connector: a place outside the cache where pages lie, found by their keys.

A key is what page hashes are (all tokens up to the page's end, and the group of layers), behind the identity of what
was computed: weights, dtype, form of the cache. A page is a row of int32, the same number of them for each.

Two halves meet here. The books (books.py) ask between steps, and are never kept waiting; what takes long runs in
threads of the connector's own, and comes as it comes: by page, in any order, or not at all.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.int32]]  # [pages, words]


class Arrived(NamedTuple):
    """What has come of a load since it was last asked. Places are those of its keys."""

    places: list[int]
    rows: Rows  # of these
    failed: dict[int, str] = {}  # places of pages that do not come, and why


class Load(ABC):
    """Pages on their way."""

    @abstractmethod
    def take(self, most: int) -> Arrived:
        """At most so many of those that have come; each is given once."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether all were given, or have failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits for it any more."""


class Lookup(ABC):
    """What lies there of some pages, which it takes a while to know."""

    @property
    @abstractmethod
    def there(self) -> list[bool] | None:
        """By page; None as long as it is not known, which is not for ever."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits for it any more."""


class Connector(ABC):
    """One place. All of this is called by the engine's thread alone."""

    keeps = True  # whether it wants what is computed
    private = False  # whether other ranks, which are processes, may have other pages than lies() says of this one
    late = False  # whether has() knows of nothing, and what lies there has to be looked up

    def look_up(self, keys: Sequence[bytes]) -> Lookup:
        """Begins to find out which of these are there, the first of a request's first."""
        raise AssertionError("what is known at once was looked up")

    def __init__(self) -> None:
        self.changed = threading.Event()  # set by its threads, when a load has something to give

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Whether the page is there, as far as is known without waiting. It may still fail to come."""

    def lies(self, key: bytes) -> bool:
        """Whether the page is there for this rank, where that is private."""
        return False

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> Load:
        """Begins to bring these pages, which it has, or all ranks have, or a look-up has found. A page that fails is
        not had any more."""

    @abstractmethod
    def store(self, keys: Sequence[bytes], rows: Rows) -> None:
        """Keeps these pages, as far as it has room. The rows are the connector's from now on."""

    @abstractmethod
    def clear(self) -> None:
        """No key of before will be asked for again."""

    def counts(self) -> Mapping[str, int]:
        """What it tells of itself, by name."""
        return {}

    def close(self) -> None:  # noqa: B027  # one without threads has nothing to end
        """Ends its threads; what was to be kept is, if that takes moments."""


class Nowhere(Connector):
    """Keeps nothing: an engine that has other engines alone."""

    keeps = False

    def has(self, key: bytes) -> bool:
        return False

    def load(self, keys: Sequence[bytes]) -> Load:
        raise AssertionError("a page was asked for that is nowhere")

    def store(self, keys: Sequence[bytes], rows: Rows) -> None:
        raise AssertionError("a page was stored nowhere")

    def clear(self) -> None:
        pass
