"""The memory in which a giver's pages wait, as a taker reads it: mapped here, or fetched by a library that moves bytes.

A giver says in which row a page lies, and keeps it there until the taker has said that it was read and was answered:
who was too slow, and read what others had been put in its place, is never answered, and throws it away.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quintet.engine.elsewhere.connector import Rows
from quintet.engine.elsewhere.wire import MOST_KEYS, Broken, Channel

AHEAD = 2**25  # bytes of a load that wait for the engine, before more is asked for


class Far(Protocol):
    """Of one giver, as long as one connection to it lasts."""

    def read(self, rows: Sequence[int]) -> Rows:
        """A copy of these. Broken says why not."""

    def close(self) -> None: ...


Open = Callable[[Channel, int], Far]  # once both have proved who they are; with the words of a row of the giver's
Share = Callable[[Channel], None]  # the giver's side of it


def at_once(words: int) -> int:
    """Pages that are asked for in one piece, where a row has so many words."""
    return max(1, min(MOST_KEYS, AHEAD // max(4 * words, 1)))


class Mapped:
    """Memory of another process of this machine."""

    def __init__(self, channel: Channel, words: int) -> None:
        descriptor = channel.borrow()
        try:
            count = os.fstat(descriptor).st_size // (4 * words)
            memory = mmap.mmap(descriptor, 4 * words * count, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise Broken(f"the memory that it shares cannot be read: {error}") from None
        finally:
            os.close(descriptor)
        self._rows = np.ndarray((count, words), np.int32, memory)

    def read(self, rows: Sequence[int]) -> Rows:
        if max(rows) >= len(self._rows):
            raise Broken("a page that lies nowhere")
        return self._rows[list(rows)]

    def close(self) -> None:
        del self._rows


def lend(channel: Channel, descriptor: int | None) -> None:
    """For reading alone."""
    if descriptor is None:
        raise Broken("the engine ends")
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        channel.lend(readable)
    finally:
        os.close(readable)
