"""Connections that have not proved to know the key, in bounded number; and bounded lines of the log for them."""

import contextlib
import logging
import socket
import threading
import time

from quintet.common.unauthenticated import UnauthenticatedConnections

LOG_LINES, LOG_SECONDS = 10, 60.0  # lines at most in so many seconds


class Handshakes:
    """Connections that are being authenticated. A new one is always taken: for it the oldest of its address is ended,
    or the oldest of all. So strangers delay no connection that answers at once."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._pending = UnauthenticatedConnections[socket.socket](most)

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, connection: socket.socket, host: str) -> None:
        with self._lock:
            ended = self._pending.add(connection, host)
            if ended is None and len(self._pending) > self._most:
                ended = self._pending.oldest
            if ended is not None:
                self._pending.remove(ended)
                with contextlib.suppress(OSError):  # it has ended just now
                    ended.shutdown(socket.SHUT_RDWR)

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._pending.remove(connection)


class BoundedLog:
    """Warnings that strangers cause: LOG_LINES of them in LOG_SECONDS, then their number."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._lock = logger, threading.Lock()
        self._since, self._count = 0.0, 0

    def warning(self, text: str, *arguments: object) -> None:
        with self._lock:
            if time.monotonic() - self._since > LOG_SECONDS:
                if self._count > LOG_LINES:
                    self._logger.warning("%d more lines like these were left out", self._count - LOG_LINES)
                self._since, self._count = time.monotonic(), 0
            self._count += 1
            if self._count <= LOG_LINES:
                self._logger.warning(text, *arguments)
            if self._count == LOG_LINES:
                self._logger.warning("further lines like these are counted alone for %.0f s", LOG_SECONDS)
