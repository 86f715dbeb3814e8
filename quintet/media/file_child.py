"""A child process that answers orders in turn; large data passes through two files that have no name."""

import os
import queue
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from io import FileIO
from typing import Any, BinaryIO

import msgspec

from quintet.common.processes import Child, Exit, follow_parent, read_orders

MAX_LINE = 2**14  # bytes of an order or an answer
_LOOK = 0.5  # seconds between two looks at signals


class FilesOrders(msgspec.Struct, array_like=True):
    """File descriptors: data of an order, and data of its answer."""

    source: int
    result: int


class FileChild:
    """A process, and the two files that it shares with this one. For one thread at a time."""

    def __init__(self, module: str) -> None:
        """`module`: its main() calls serve_orders()."""
        self.num_orders = 0
        self._source, self._result = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        files = self._source.fileno(), self._result.fileno()
        self.child = Child(
            module, FilesOrders(*files), inherit=files, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    @property
    def is_running(self) -> bool:
        """True if it can answer."""
        return self.child.exit is None

    def ask(self, order: Any, data: Iterable[bytes | memoryview], seconds: float) -> bytes | None:
        """Returns the line that it answers, None if it ends or takes longer. It is not to be asked again then."""
        self._source.seek(0)
        self._source.truncate()
        for each in data:
            self._source.write(each)
        self._source.flush()
        self.num_orders += 1
        self.child.tell(msgspec.json.encode(order) + b"\n")
        return self._line(seconds)

    def result(self, size: int) -> bytes | None:
        """Returns the data of the answer, None if it has not so many bytes."""
        if os.fstat(self._result.fileno()).st_size != size:
            return None
        found = os.pread(self._result.fileno(), size, 0)
        while len(found) < size:  # one call reads up to 2 GiB
            if not (more := os.pread(self._result.fileno(), size - len(found), len(found))):
                return None
            found += more
        return found

    def end(self) -> Exit | None:
        """Waits a little for its end -> its exit status; None if it still runs."""
        return self.child.wait(_LOOK)

    def close(self) -> None:
        """Ends it."""
        self.child.kill()
        self.child.close()
        self._source.close()
        self._result.close()

    def _line(self, seconds: float) -> bytes | None:
        number, end, found = self.child.stdout.fileno(), time.monotonic() + seconds, b""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if not poll.poll(min(left, _LOOK) * 1000):  # short waits: a signal's handler runs between two
                continue
            piece = os.read(number, 4096)
            found += piece
            if not piece or len(found) > MAX_LINE:
                return None
            if found.endswith(b"\n"):
                return found
        return None


# In the child:

Handle = Callable[[bytes, FileIO, BinaryIO], Any]  # order, its data, file for the answer's data -> the answer


def serve_orders(handle: Handle, nice: int = 0) -> None:
    """Answers orders until the parent ends. The file for the answer's data is empty before each."""
    orders = read_orders(FilesOrders)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    follow_parent(lines.put)
    os.nice(nice)
    with (
        os.fdopen(orders.source, "rb", buffering=0) as source,
        os.fdopen(orders.result, "wb") as result,
        os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as answers,
    ):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
        while True:
            line = lines.get().encode()
            source.seek(0)
            result.seek(0)
            result.truncate()
            answer = handle(line, source, result)
            result.flush()
            answers.write(msgspec.json.encode(answer) + b"\n")
