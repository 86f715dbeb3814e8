"""A library that moves bytes between engines, for tests: within this process, and as unreliable as it is asked."""

import ctypes
import threading
from collections.abc import Sequence

import numpy as np

from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import ProtocolError


class Copying:
    """kind: whole; late: a transfer ends some looks later; torn: it fails when half is there; silent: it does not end,
    and lets go of its memory only some time after it was given up; cut: it does not begin; strange: nobody is met."""

    def __init__(self, kind: str = "whole") -> None:
        self.kind, self._lock, self._asked = kind, threading.Lock(), 0
        self.offered, self.met, self.begun, self.closed = list[PageRows](), list[str](), 0, False

    def odd(self) -> bool:
        """Every third time, beginning with the second."""
        with self._lock:
            self._asked += 1
            return self._asked % 3 == 2

    def register_source(self, rows: PageRows) -> None:
        self.offered.append(rows)

    def register_buffer(self, rows: PageRows) -> None:
        self.offered.append(rows)

    def metadata(self) -> bytes:
        return b"a test"

    def connect(self, told: bytes) -> str:
        if told != b"a test" or (self.kind == "strange" and self.odd()):
            raise ProtocolError("nobody is met")
        self.met.append("peer")
        return "peer"

    def disconnect(self, peer: str) -> None:
        self.met.remove(peer)

    def start_read(self, peer: str, addresses: Sequence[int], into: PageRows) -> "Copy":
        if self.kind == "cut" and self.odd():
            raise ProtocolError("it does not begin")
        self.begun += 1
        return Copy(self, addresses, into)

    def close(self) -> None:
        self.closed = True


class Copy:
    def __init__(self, mover: Copying, addresses: Sequence[int], into: PageRows) -> None:
        self._addresses, self._into = list(addresses), into
        self._kind = mover.kind if mover.odd() else "whole"
        self._looks, self._held = 3 if self._kind == "late" else 0, 2 if self._kind == "silent" else 0

    def done(self) -> bool:
        if self._kind == "silent":
            self._into[:] = -1
            return False
        if self._looks:
            self._looks -= 1
            return False
        count = len(self._addresses) // 2 if self._kind == "torn" else len(self._addresses)
        for at in range(count):
            row = self._into[at]
            ctypes.memmove(row.ctypes.data, self._addresses[at], row.nbytes)
        if self._kind == "torn":
            raise ProtocolError("it is torn")
        return True

    def cancel(self) -> bool:
        if self._held:
            self._held -= 1
            self._into[:] = np.int32(-1)
            return False
        return True
