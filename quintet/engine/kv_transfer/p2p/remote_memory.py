"""Memory in which a producer's pages wait, as a consumer reads it: mapped here, or read by a transfer library.

A producer sends the row of a page, and keeps the page there until the consumer has reported its copy, and was answered.
A consumer that was too slow, and read a row that was reused, gets no answer, and discards its copy.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import MAX_KEYS, PeerChannel, ProtocolError

MAX_BYTES_AHEAD = 2**25  # bytes of a load that wait for the engine before more is requested


class RemoteRegion(Protocol):
    """Memory of one producer, as long as one connection to it lasts."""

    def read(self, rows: Sequence[int]) -> PageRows:
        """Returns a copy of these rows. ProtocolError says why it cannot."""

    def close(self) -> None: ...


OpenRegion = Callable[[PeerChannel, int], RemoteRegion]  # after authentication; with the words of a producer's row
ShareMemory = Callable[[PeerChannel], None]  # the producer's side of it


def pages_per_request(words: int) -> int:
    """Returns the number of pages that are asked for at once, where a row has so many words."""
    return max(1, min(MAX_KEYS, MAX_BYTES_AHEAD // max(4 * words, 1)))


class MappedRegion:
    """Mapped memory of another process of this machine."""

    def __init__(self, channel: PeerChannel, words: int) -> None:
        descriptor = channel.receive_descriptor()
        try:
            count = os.fstat(descriptor).st_size // (4 * words)
            memory = mmap.mmap(descriptor, 4 * words * count, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the memory that it shares cannot be read: {error}") from None
        finally:
            os.close(descriptor)
        self._rows = np.ndarray((count, words), np.int32, memory)

    def read(self, rows: Sequence[int]) -> PageRows:
        if max(rows) >= len(self._rows):
            raise ProtocolError("a page that lies nowhere")
        return self._rows[list(rows)]

    def close(self) -> None:
        del self._rows


def send_memory(channel: PeerChannel, descriptor: int | None) -> None:
    """Sends a descriptor of the memory, for reading alone."""
    if descriptor is None:
        raise ProtocolError("the engine ends")
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        channel.send_descriptor(readable)
    finally:
        os.close(readable)
