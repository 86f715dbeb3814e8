"""Decodes images and videos in child processes. One process decodes many files in turn: its start takes longer than an
image does. A decoder that crashes or never ends is an error of that file alone."""

import logging
import math
import mmap
import os
import select
import subprocess
import tempfile
import threading
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from quintet.common.processes import Child
from quintet.media.children import CRASHES
from quintet.media.decoding.jobs import DecodeJob, DecodeReport
from quintet.media.decoding.worker import CPU_SECONDS, Orders
from quintet.media.errors import MediaError, MediaPackageMissing
from quintet.media.items import IMAGE

logger = logging.getLogger(__name__)

PROCESSES = 2  # at a time; other files wait
MAX_FILES = 256  # that one process decodes: what libraries leak ends with it
PATIENCE = 4  # seconds of waiting for each second of processor time: other work goes before it
_STARTING = 60.0  # seconds in which a process starts, on a busy machine
_MAX_LINE = 2**14  # bytes of a report
_TOO_MUCH = "it takes too much time or memory to decode; send a smaller one"
_CRASHED = "its decoder crashed; convert it to PNG (images) or MP4 (videos)"


class MediaDecoder:
    """Decodes files; starts processes as they are needed. Its methods may be called by several threads."""

    def __init__(self, timeout: float | None = None) -> None:
        """`timeout`: seconds for one file; if None it follows from the limit of processor time."""
        self._timeout = timeout
        self._places = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_DecodingChild] = []
        self._lock = threading.Lock()

    def decode(self, content: bytes, job: DecodeJob) -> tuple[NDArray[np.uint8], float]:
        """Returns the array of a file and, of a video, frames a second. MediaError says why it is not decoded."""
        with self._places:
            child = self._child()
            try:
                found = child.run(content, job, self._seconds(job))
            except BaseException:
                child.close()
                raise
            if child.num_files < MAX_FILES:
                with self._lock:
                    self._idle.append(child)
            else:
                child.close()
        if isinstance(found, MediaError):
            raise found
        return found

    def close(self) -> None:
        """Ends the processes that decode nothing."""
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _child(self) -> "_DecodingChild":
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None and child.is_running:
            return child
        if child is not None:
            child.close()
        return _DecodingChild()

    def _seconds(self, job: DecodeJob) -> float:
        return PATIENCE * CPU_SECONDS[job.kind] if self._timeout is None else self._timeout


class _DecodingChild:
    """A process, and the two files that it shares with this one."""

    def __init__(self) -> None:
        self.num_files = 0
        self._source, self._result = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        files = self._source.fileno(), self._result.fileno()
        self._child = Child(
            "quintet.media.decoding.worker", Orders(*files), inherit=files, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._child.exit is None

    def run(self, content: bytes, job: DecodeJob, seconds: float) -> tuple[NDArray[np.uint8], float] | MediaError:
        """Returns the array, or why the process refuses the file; it may be used again then.

        MediaError is raised if the file ends the process.
        """
        self._source.seek(0)
        self._source.truncate()
        self._source.write(content)
        self._source.flush()
        starts = _STARTING if not self.num_files else 0.0
        self.num_files += 1
        self._child.tell(msgspec.json.encode(job) + b"\n")
        line = self._line(seconds + starts)
        if line is None:
            raise self._ended()
        try:
            report = msgspec.json.decode(line, type=DecodeReport)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise MediaError(_CRASHED) from None
        if report.lacking:
            return MediaPackageMissing(report.error)
        if report.error:
            return MediaError(report.error)
        size, axes = math.prod(report.shape), 3 if job.kind == IMAGE else 4
        fits = len(report.shape) == axes and min(report.shape) > 0 and report.shape[-1] == 3 and size <= job.max_bytes
        if not fits or not report.rate >= 0 or os.fstat(self._result.fileno()).st_size != size:
            raise MediaError(_CRASHED)  # a file may have taken the process over
        with mmap.mmap(self._result.fileno(), size, access=mmap.ACCESS_READ) as pages:
            return np.frombuffer(bytes(pages), np.uint8).reshape(report.shape), report.rate

    def _line(self, seconds: float) -> bytes | None:
        """Returns the line that the process writes, None if it ends or takes longer."""
        number, end, found = self._child.stdout.fileno(), time.monotonic() + seconds, b""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        while (left := end - time.monotonic()) > 0:
            if not poll.poll(min(left, 0.5) * 1000):  # short waits: a signal's handler of Python's runs between two
                continue
            piece = os.read(number, 4096)
            if not piece:
                return None
            found += piece
            if len(found) > _MAX_LINE:
                return None
            if found.endswith(b"\n"):
                return found
        return None

    def _ended(self) -> Exception:
        status = self._child.wait(0.5)
        if status is not None and status.code >= 0:  # no limit ends it so
            logger.error("the process that decodes images and videos ended with %s", status)
            return RuntimeError(f"the process that decodes images and videos failed: {status}")
        return MediaError(_CRASHED if status is not None and -status.code in CRASHES else _TOO_MUCH)

    def close(self) -> None:
        self._child.kill()
        self._child.close()
        self._source.close()
        self._result.close()
