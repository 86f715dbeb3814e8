"""Fetches and decodes the media of a prompt."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.decode import PROCESSES, AudioDecoder, AudioError, AudioPackageMissing
from quintet.media.decoding.decoder import MediaDecoder
from quintet.media.decoding.jobs import MAX_DECODED_BYTES, DecodeJob
from quintet.media.errors import MediaError, MediaPackageMissing
from quintet.media.fetch.http import FetchRules
from quintet.media.fetch.sources import MediaSources
from quintet.media.info import MediaInfo
from quintet.media.io_options import merge_io_options, read_io_options
from quintet.media.items import AUDIO, IMAGE, VIDEO, DecodedMedia
from quintet.media.lazy_numpy import np
from quintet.media.parts import MediaPart
from quintet.media.tensors import read_embeds

if TYPE_CHECKING:
    from numpy.typing import NDArray

FETCHERS = 8  # URLs that are fetched at once, of all requests
MAX_AUDIO_SECONDS = 3600.0  # of one recording
_MAX_URL_BYTES = 2**29  # of all files of a request, as they come
_AUDIO_PLACES = threading.BoundedSemaphore(PROCESSES)  # recordings that are decoded at once


class MediaReader:
    """Reads the media of prompts by what a model takes and its operator allows. Threads may share one."""

    def __init__(self, info: MediaInfo, rules: FetchRules | None = None, decoder: MediaDecoder | None = None) -> None:
        """`rules`, `decoder`: instead of those that follow from `info`."""
        self._info = info
        rules = FetchRules(info.domains) if rules is None else rules
        self._sources = MediaSources(rules, info.local_path, info.timeouts)
        self._decoder = MediaDecoder() if decoder is None else decoder
        self._fetchers: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends the threads and processes that do nothing."""
        self._decoder.close()
        if self._fetchers is not None:
            self._fetchers.shutdown(wait=False, cancel_futures=True)

    def check_counts(self, kinds: Sequence[str], where: str = "") -> None:
        """Raises MediaError if a prompt with media of these kinds has too many of one, or one that is not taken."""
        for kind in dict.fromkeys(kinds):
            most, count = self._info.limits.get(kind), kinds.count(kind)
            if most is None:
                known = ", ".join(self._info.kinds) or "text alone"
                raise MediaError(
                    f"it has an item of the kind {kind}, and this model takes {known}; leave it out", where
                )
            if count > most:
                raise MediaError(
                    f"it has {count} items of the kind {kind}, and {most} are the most (--limit-mm-per-prompt); send "
                    "fewer", where,
                )  # fmt: skip

    def read(self, parts: Sequence[MediaPart], io_options: Mapping[str, Any] | None = None) -> list[DecodedMedia]:
        """Returns the media in order. Waits for hosts and decoders, within limits of time, bytes and pixels.

        `io_options`: media_io_kwargs of the request. MediaError has the place of the part that cannot be used.
        """
        options = read_io_options(merge_io_options(self._info.io_options, io_options))
        files = self._fetch(parts)
        left, found = MAX_DECODED_BYTES, []
        for part, contents in zip(parts, files, strict=True):
            media = _placed(part, functools.partial(self._decode, part, contents, options, left))
            left -= media.data.nbytes
            if left < 0:
                raise _too_much(part)
            found.append(replace(media, uuid=part.uuid) if part.uuid else media)
        return found

    def _fetch(self, parts: Sequence[MediaPart]) -> list[list[bytes]]:
        """Returns the files of each part; none of those that need none."""
        remote = {at for at, part in enumerate(parts) if part.url[:5].lower().startswith("http")}
        waiting = {}
        if len(remote) > 1:
            waiting = {at: self._pool().submit(self._sources.read, parts[at].kind, parts[at].url) for at in remote}
        files: list[list[bytes]] = []
        try:
            total = 0
            for at, part in enumerate(parts):
                if at in waiting:
                    contents = _placed(part, waiting[at].result)
                else:
                    contents = _placed(part, functools.partial(self._local, part))
                total += sum(map(len, contents))
                if total > _MAX_URL_BYTES:
                    raise _too_much(part)
                files.append(contents)
        finally:
            for each in waiting.values():
                each.cancel()
        return files

    def _local(self, part: MediaPart) -> list[bytes]:
        return self._sources.read(part.kind, part.url) if part.url else []

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._fetchers is None:
                self._fetchers = ThreadPoolExecutor(FETCHERS, "quintet-fetch")
            return self._fetchers

    def _decode(
        self, part: MediaPart, contents: Sequence[bytes], options: Mapping[str, DecodeJob], left: int
    ) -> DecodedMedia:
        if part.media is not None:
            return part.media
        if part.embeds is not None:
            rows = read_embeds(part.embeds, self._info.embeds_width)
            return DecodedMedia(part.kind, rows, uuid=part.uuid, is_rows=True)
        if part.kind == AUDIO:
            return DecodedMedia(AUDIO, _decode_audio(contents[0]), SAMPLE_RATE)
        job = _with_bytes(options[part.kind], left)
        if len(contents) > 1 or (part.kind == VIDEO and part.url[:11].lower() == "data:video/" and _is_jpeg(contents)):
            return DecodedMedia(VIDEO, self._frames(contents, _with_bytes(options[IMAGE], left)))
        pixels, times = self._decoder.decode(contents[0], job)
        return DecodedMedia(part.kind, pixels, 0.0 if times is None else times.sampled_rate, times=times)

    def _frames(self, contents: Sequence[bytes], job: DecodeJob) -> NDArray[np.uint8]:
        """Returns the frames of a video that was sent as images."""
        frames: list[NDArray[np.uint8]] = []
        for content in contents:
            job.max_bytes -= frames[-1].nbytes if frames else 0
            frames.append(self._decoder.decode(content, job)[0])
            if frames[-1].shape != frames[0].shape:
                raise MediaError(f"its frames have {frames[0].shape} and {frames[-1].shape} pixels; give them one size")
        return np.stack(frames)


def _is_jpeg(contents: Sequence[bytes]) -> bool:
    return contents[0].startswith(b"\xff\xd8\xff")


def _with_bytes(job: DecodeJob, left: int) -> DecodeJob:
    """Returns a job for the bytes that are left of a request."""
    return DecodeJob(job.kind, max(left, 1), job.background, job.num_frames, job.fps)


def _decode_audio(content: bytes) -> NDArray[np.float32]:
    """Returns mono samples at 16 kHz. MediaError says why a file cannot be decoded."""
    with _AUDIO_PLACES, tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        try:
            return np.array(AudioDecoder(MAX_AUDIO_SECONDS).decode_here(file).samples)
        except AudioPackageMissing as error:
            raise MediaPackageMissing(str(error)) from None
        except AudioError as error:
            raise MediaError(str(error).removeprefix("the audio cannot be read: ")) from None


def _placed(part: MediaPart, work: Callable[[], Any]) -> Any:
    """Runs work for a part; its errors get the part's place."""
    try:
        return work()
    except MediaError as error:
        error.where = error.where or part.where
        raise


def _too_much(part: MediaPart) -> MediaError:
    problem = f"its media take more than {MAX_DECODED_BYTES} bytes together, decoded; send fewer or smaller ones"
    return MediaError(problem, part.where)
