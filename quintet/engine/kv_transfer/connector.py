"""Interface of a KV connector: storage outside the KV cache that finds pages by their keys.

A key is the identity of the computation (weights, dtype, cache layout), followed by the page hash (all tokens up to the
page's end, and the group of layers). A page is a row of int32, of the same length for each.

The engine (manager.py) calls a connector between steps, and never waits for it; slow work runs in threads of the
connector's own, and pages arrive one by one, in any order, or not at all.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

PageRows = np.ndarray[Any, np.dtype[np.int32]]  # [pages, words]


class LoadedPages(NamedTuple):
    """Pages of a load that have arrived since the last call. Places are indices of the load's keys."""

    indices: list[int]
    rows: PageRows  # of these
    failed: dict[int, str] = {}  # places of pages that failed, and why


class Load(ABC):
    """Pages that are being loaded."""

    @abstractmethod
    def take(self, most: int) -> LoadedPages:
        """Returns at most so many of the pages that have arrived; each page once."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once all pages were returned, or have failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Drops the load: its pages are not needed any more."""


class Lookup(ABC):
    """Look-up that takes a while: which of some pages the connector has."""

    @property
    @abstractmethod
    def found(self) -> list[bool] | None:
        """Returns, by page, whether it is there; None while that is not known, which is for a limited time."""

    @abstractmethod
    def cancel(self) -> None:
        """Drops the look-up: its result is not needed any more."""


class KVConnector(ABC):
    """One KV connector. Only the engine's thread calls it."""

    stores = True  # whether it stores computed pages
    per_rank = False  # whether other rank processes may have other pages than lies() returns for this one
    has_lookup = False  # whether has() is always False, and pages are found by look_up()

    def look_up(self, keys: Sequence[bytes]) -> Lookup:
        """Starts to find out which of these pages are there, in the order of the request."""
        raise AssertionError("what is known at once was looked up")

    def __init__(self) -> None:
        self.changed = threading.Event()  # set by its threads, when a load or a look-up has a result

    @abstractmethod
    def has(self, key: bytes) -> bool:
        """Returns whether the page is there, as far as is known without waiting. Its load may still fail."""

    def has_locally(self, key: bytes) -> bool:
        """Returns whether this rank has the page, where that is private."""
        return False

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> Load:
        """Starts to load these pages, which it has, or all ranks have, or a look-up has found. A page that fails is not
        found any more."""

    @abstractmethod
    def store(self, keys: Sequence[bytes], rows: PageRows) -> None:
        """Stores these pages, as far as there is room. The connector owns the rows from now on."""

    @abstractmethod
    def clear(self) -> None:
        """Called when no earlier key will be asked for again."""

    def counts(self) -> Mapping[str, int]:
        """Returns the connector's counters, by name."""
        return {}

    def close(self) -> None:  # noqa: B027  # one without threads has nothing to end
        """Ends its threads; queued pages are stored first, if that takes moments."""


class NullConnector(KVConnector):
    """Null connector, which stores nothing: for an engine that only exchanges pages with other engines."""

    stores = False

    def has(self, key: bytes) -> bool:
        return False

    def load(self, keys: Sequence[bytes]) -> Load:
        raise AssertionError("a page was asked for that is nowhere")

    def store(self, keys: Sequence[bytes], rows: PageRows) -> None:
        raise AssertionError("a page was stored nowhere")

    def clear(self) -> None:
        pass
