"""Decodes audio files to samples at 16 kHz, each file in a child process with limits on time, memory and length.

A decoder that crashes or never ends is an error of that file alone. WAV, FLAC, MP3 and Ogg are read by soundfile, these
and M4A, MP4, AAC and WebM by av (PyAV): the extra `audio`.
"""

import asyncio
import contextlib
import logging
import mmap
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import BinaryIO

import msgspec

from quintet.common.distribution import install_hint
from quintet.common.processes import Child, Exit
from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import Samples
from quintet.media.audio.worker import CPU_SECONDS, CPU_SHARE, Decoded, Orders
from quintet.media.children import CRASHES
from quintet.media.lazy_numpy import np

logger = logging.getLogger(__name__)

MAX_AUDIO_SECONDS = 2 * 3600.0  # of one file, if the caller asks for no other limit
PROCESSES = 2  # at a time; other files wait
PATIENCE = 4  # seconds of waiting for each second of processor time: other work goes before it
CRASHED = "its decoder crashed; convert it, for instance: ffmpeg -i FILE -ar 16000 -ac 1 a.wav"
TOO_MUCH = "it takes too much time or memory to decode; convert it, for instance: ffmpeg -i FILE -ar 16000 -ac 1 a.wav"


class AudioError(ValueError):
    """An audio file that is not decoded: what is wrong with it, and what to do."""


class AudioPackageMissing(AudioError):
    """A package that decodes the file is not installed; the text has the command that installs it."""


@dataclass(frozen=True)
class Audio:
    """Decoded sound."""

    samples: Samples = field(repr=False)  # [N] at 16 kHz, read-only: pages of an unlinked temporary file
    rate: int  # samples a second in the file
    channels: int  # in the file; their mean is taken

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class AudioDecoder:
    """Decodes files; starts a process for each. Its async method is for one event loop."""

    def __init__(self, max_seconds: float = MAX_AUDIO_SECONDS, timeout: float | None = None) -> None:
        """`timeout`: seconds for one file, the start of its process included; if None it follows from `max_seconds`."""
        self._max_seconds = max_seconds
        self._timeout = PATIENCE * (CPU_SECONDS + CPU_SHARE * max_seconds) if timeout is None else timeout
        self._places = asyncio.Semaphore(PROCESSES)

    async def decode(self, source: BinaryIO) -> Audio:
        """Returns the sound of an open file, which stays open; its position changes. Cancelling ends the process.

        AudioError if it cannot be decoded, is longer than `max_seconds`, or a limit ends its process; RuntimeError if
        the process fails by itself.
        """
        async with self._places:
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[Exit] = loop.create_future()
            with _Decoding(source, self._max_seconds) as decoding:
                decoding.child.follow(lambda status: _call_in(loop, ended, status))
                try:
                    status: Exit | None = await asyncio.wait_for(ended, self._timeout)
                except asyncio.TimeoutError:
                    status = None
                return decoding.result(status)

    def decode_here(self, source: BinaryIO) -> Audio:
        """Does what decode() does, and waits for it in the calling thread."""
        with _Decoding(source, self._max_seconds) as decoding:
            return decoding.result(_wait(decoding.child, self._timeout))


def _wait(child: Child, timeout: float) -> Exit | None:
    """In short waits: a signal's handler of Python's runs between two."""
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        if (status := child.wait(min(left, 0.5))) is not None:
            return status
    return None


def _call_in(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Exit]", status: Exit) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(_set_once, future, status)


def _set_once(future: "asyncio.Future[Exit]", status: Exit) -> None:
    if not future.done():
        future.set_result(status)


class _Decoding:
    """A process that decodes a file, and its results. The process ends with the block."""

    def __init__(self, source: BinaryIO, max_seconds: float) -> None:
        self._samples, self._report = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        files = source.fileno(), self._samples.fileno(), self._report.fileno()
        self.child = Child(
            "quintet.media.audio.worker", Orders(*files, max_seconds), inherit=files, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> "_Decoding":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.child.kill()
        self.child.close()
        self._samples.close()
        self._report.close()

    def result(self, status: Exit | None) -> Audio:
        return result_of(status, self._report, self._samples)


def result_of(status: Exit | None, report: BinaryIO, samples: BinaryIO) -> Audio:
    """Returns what a process has written, or raises the error that its end is.

    `status`: None if it has not ended in time.
    """
    report.seek(0)
    written = report.read()
    if status is None or status.code < 0 or not written:
        if status is not None and status.code > 0:  # no limit ends it so
            logger.error("the process that decodes an audio file ended with %s", status)
            raise RuntimeError(f"the process that decodes audio failed: {status}")
        crashed = status is not None and -status.code in CRASHES
        raise AudioError(f"the audio cannot be read: {CRASHED if crashed else TOO_MUCH}")
    decoded = msgspec.json.decode(written, type=Decoded)
    if decoded.lacking:
        raise AudioPackageMissing(f"{decoded.error}: {install_hint('audio')}")
    if decoded.error:
        raise AudioError(f"the audio cannot be read: {decoded.error}")
    pages = mmap.mmap(samples.fileno(), decoded.count * 4, access=mmap.ACCESS_READ)
    return Audio(np.frombuffer(pages, np.float32), decoded.rate, decoded.channels)
