"""Decodes images and videos in child processes.

One process decodes many files in turn: its start takes longer than an image does. A decoder that crashes or never ends
is an error of that file alone.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from quintet.media.children import CRASHES
from quintet.media.decoding.jobs import DecodeJob, DecodeReport
from quintet.media.decoding.worker import CPU_SECONDS
from quintet.media.errors import MediaError, MediaPackageMissing
from quintet.media.file_child import FileChild
from quintet.media.items import IMAGE, VideoTimes
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Decoded = tuple[NDArray[np.uint8], VideoTimes | None]

logger = logging.getLogger(__name__)

PROCESSES = 2  # at a time; other files wait
MAX_FILES = 256  # that one process decodes: what libraries leak ends with it
PATIENCE = 4  # seconds of waiting for each second of processor time: other work goes before it
_STARTING = 60.0  # seconds in which a process starts, on a busy machine
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

    def decode(self, content: bytes, job: DecodeJob) -> Decoded:
        """Returns the array of a file and, of a video, its times. MediaError says why it is not decoded."""
        with self._places:
            child = self._child()
            try:
                found = child.run(content, job, self._seconds(job))
            except BaseException:
                child.close()
                raise
            if child.num_orders < MAX_FILES:
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

    def _child(self) -> _DecodingChild:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        if child is not None and child.is_running:
            return child
        if child is not None:
            child.close()
        return _DecodingChild()

    def _seconds(self, job: DecodeJob) -> float:
        return PATIENCE * CPU_SECONDS[job.kind] if self._timeout is None else self._timeout


class _DecodingChild(FileChild):
    """A process that decodes."""

    def __init__(self) -> None:
        super().__init__("quintet.media.decoding.worker")

    def run(self, content: bytes, job: DecodeJob, seconds: float) -> Decoded | MediaError:
        """Returns the array, or why the process refuses the file; it may be used again then.

        MediaError is raised if the file ends the process.
        """
        line = self.ask(job, (content,), seconds + (0.0 if self.num_orders else _STARTING))
        if line is None:
            raise self._failure()
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
        timed = job.kind == IMAGE or _is_timed(report.times, report.shape)
        if not fits or not timed or (pixels := self.result(size)) is None:
            raise MediaError(_CRASHED)  # a file may have taken the process over
        return np.frombuffer(pixels, np.uint8).reshape(report.shape), report.times

    def _failure(self) -> Exception:
        status = self.end()
        if status is not None and status.code >= 0:  # no limit ends it so
            logger.error("the process that decodes images and videos ended with %s", status)
            return RuntimeError(f"the process that decodes images and videos failed: {status}")
        return MediaError(_CRASHED if status is not None and -status.code in CRASHES else _TOO_MUCH)


def _is_timed(times: VideoTimes | None, shape: Sequence[int]) -> bool:
    """True if the times are those of so many frames."""
    if times is None or not shape or len(times.frames) != shape[0] or not 0 <= times.rate < math.inf:
        return False
    numbers = [-1, *times.frames, times.total]
    return all(first < second for first, second in itertools.pairwise(numbers))
