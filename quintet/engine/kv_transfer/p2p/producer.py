"""Producer of pages: serves those that wait for other engines, by a thread that listens and one for each connection."""

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quintet.distributed.handshakes import BoundedLog, Handshakes
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import (
    COPIED,
    REQUEST,
    LeaseDone,
    MissingPages,
    Page,
    PageFormat,
    PageOffer,
    PageRequest,
    PeerChannel,
    ProtocolError,
    RowsUnchanged,
)
from quintet.engine.kv_transfer.p2p.remote_memory import ShareMemory
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # connections at once: each process of another engine has four at most
MAX_HANDSHAKES = 64  # more of them that have not authenticated
HANDSHAKE_SECONDS = 5.0  # seconds that a new connection may take to authenticate
POLL_SECONDS = 0.5  # seconds from one look at the clock to the next
MAX_REASON = 300  # characters of why there are no pages


class PageServer:
    """Producer: sends pages in `loans` to any engine that has the key and runs the same model."""

    def __init__(self, loans: SendBuffer, facts: Callable[[], PageFormat], key: bytes, patience: float) -> None:
        """patience: seconds that a peer may be silent within a frame, and ten times as many between two asks."""
        self._loans, self._facts, self._key, self._patience = loans, facts, key, patience
        self.transport = ""  # transport of pages
        self.share_memory: ShareMemory | None = None  # lets consumers read pages in place; None: pages are sent
        self._open: set[socket.socket] = set()
        self._handshakes, self._refusals = Handshakes(MAX_HANDSHAKES), BoundedLog(logger)
        self._lock, self._closed = threading.Lock(), False
        self._counts: Counter[str] = Counter()
        self._listening: socket.socket | None = None

    def listen(self, listening: socket.socket) -> None:
        """Accepts connections from now on, in a thread of its own."""
        listening.settimeout(POLL_SECONDS)
        self._listening = listening
        self._thread = threading.Thread(target=self._accept_all, args=(listening,), name="quintet-giver", daemon=True)
        self._thread.start()

    def counts(self) -> Mapping[str, int]:
        """Returns the counters since the start."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        with self._lock:
            self._closed, still = True, list(self._open)
        for connection in still:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._listening is not None:
            self._listening.close()
            self._thread.join(2 * POLL_SECONDS)

    # ------------------------------------------------------------------------------------------------------ in threads

    def _accept_all(self, listening: socket.socket) -> None:
        while not self._closed:
            self._loans.expire()
            try:
                connection, peer = listening.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if not self._closed:
                    logger.warning("KV connector: other engines cannot fetch pages any more: %s", error)
                return
            name = peer[0] if isinstance(peer, tuple) else "this machine"
            with self._lock:
                if self._closed or len(self._open) - len(self._handshakes) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._open.add(connection)
                self._handshakes.add(connection, name)
            threading.Thread(target=self.serve, args=(connection, name), name="quintet-gives", daemon=True).start()

    def serve(self, connection: socket.socket, name: str) -> None:
        """Serves one connection, until it ends."""
        facts = self._facts()
        channel = PeerChannel(connection, min(HANDSHAKE_SECONDS, self._patience), 0)
        try:
            channel.accept_consumer(self._key, facts, self.transport)
            self._handshakes.remove(connection)
            channel = channel.with_timeout(self._patience)
            if self.share_memory is not None:
                self.share_memory(channel)
            while True:
                asked = channel.receive(REQUEST, 10 * self._patience)
                if isinstance(asked, LeaseDone):
                    self._loans.finish(asked.lease, asked.readers, asked.reader)
                else:
                    self._answer(channel, asked, facts)
        except ProtocolError as error:
            if not channel.authenticated:
                self._count("refused", 1)
                self._refusals.warning("an engine at %s gets no pages: %s", name, error)
            elif not self._closed:
                logger.debug("an engine at %s is gone: %s", name, error)
        except Exception:
            logger.exception("giving pages to %s broke", name)
        finally:
            with self._lock:
                self._handshakes.remove(connection)
                self._open.discard(connection)
            connection.close()

    def _answer(self, channel: PeerChannel, asked: PageRequest, facts: PageFormat) -> None:
        _check(asked.parts, self._loans.rows.strides[0])
        found, loan = self._loans.read(asked.lease, asked.keys, self._patience)
        if self._facts() != facts:
            raise ProtocolError("the weights are others now")
        try:
            given = 0
            for place, row in enumerate(found):
                if isinstance(row, str):
                    channel.send(MissingPages([place], row[:MAX_REASON]))
                    continue
                if self.share_memory is None:
                    channel.send(Page(place, _parts(row, asked.parts)))
                else:
                    channel.send(PageOffer(place, self._loans.row_index(row)))
                given += 1
                self._count("bytes", sum(count for _, count in asked.parts) or row.nbytes)
            if given and self.share_memory is not None:
                channel.receive(COPIED)
                channel.send(RowsUnchanged())
            self._count("pages", given)
            self._count("lacked", len(found) - given)
        finally:
            if loan is not None:
                self._loans.release_read(loan)

    def _count(self, what: str, by: int) -> None:
        with self._lock:
            self._counts[what] += by


def _check(parts: Sequence[tuple[int, int]], nbytes: int) -> None:
    """Raises ProtocolError for parts that are not in rows of so many bytes."""
    if any(first + count > nbytes for first, count in parts) or sum(count for _, count in parts) > nbytes:
        raise ProtocolError("parts that no row has")


def _parts(row: PageRows, parts: Sequence[tuple[int, int]]) -> bytes:
    """Returns the wanted parts of a row."""
    content = row.view(np.uint8).data
    return b"".join(content[first : first + count] for first, count in parts) if parts else content.tobytes()
