"""Frames of videos, by av (PyAV). Frames are chosen as vLLM does: evenly over the whole video."""

from __future__ import annotations

from io import FileIO
from typing import TYPE_CHECKING, Any

from quintet.media.audio.worker import container_of
from quintet.media.decoding.images import check_size
from quintet.media.decoding.jobs import MAX_FRAMES, DecodeJob, Refused
from quintet.media.items import VideoTimes
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CONTAINERS = ("mp4", "matroska")
_NO_CONTAINER = "it is no MP4, MOV, WebM, MKV or AVI file; convert it, for instance: ffmpeg -i FILE a.mp4"


def decode_video(library: Any, source: FileIO, job: DecodeJob) -> tuple[NDArray[np.uint8], VideoTimes]:
    """Returns frames [frames, H, W, 3], and their times. `library`: the module av.

    Refused says what is wrong; FFmpeg's errors are raised for damaged files.
    """
    container = _container(source)
    total, rate = _count(library, source, container)
    wanted = frame_indices(total, rate, job.num_frames, job.fps)
    if len(wanted) > MAX_FRAMES:
        raise Refused(
            f"it would have {len(wanted)} frames, and {MAX_FRAMES} are the most; set num_frames in "
            'media_io_kwargs, such as {"video": {"num_frames": 32}}'
        )
    frames = _frames(library, source, container, set(wanted), job.max_bytes // len(wanted))
    if not frames:
        raise Refused("none of its frames can be decoded; write it again")
    return np.stack(list(frames.values())), VideoTimes(tuple(frames), total, rate)


def frame_indices(total: int, rate: float, num_frames: int, fps: float) -> list[int]:
    """Returns the frames to take of a video of `total` frames, `rate` of them a second.

    At most `num_frames` (-1: all), and at most `fps` for each second (0 and less: any); one at least.
    """
    count = min(num_frames, total) if num_frames > 0 else total
    if fps > 0 and rate > 0:
        count = min(count, int(total / rate * fps))
    return [int(each) for each in np.linspace(0, total - 1, max(count, 1), dtype=int)]


def _container(source: FileIO) -> str:
    """Returns FFmpeg's name of the container: opened as that one alone, since playlists name other files."""
    source.seek(0)
    head = source.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    name = container_of(head)
    if name not in _CONTAINERS:
        raise Refused(_NO_CONTAINER)
    return name


def _open(library: Any, source: FileIO, container: str) -> Any:
    source.seek(0)
    return library.open(source, format=container, options={"protocol_whitelist": ""})


def _stream(file: Any) -> Any:
    if not file.streams.video:
        raise Refused("it has no pictures, only sound or data; send a video")
    stream = file.streams.video[0]
    stream.codec_context.thread_count = 1
    check_size(stream.codec_context.width, stream.codec_context.height)
    return stream


def _count(library: Any, source: FileIO, container: str) -> tuple[int, float]:
    """Returns the number of frames, and how many there are for each second; by the packets, since headers may lie."""
    with _open(library, source, container) as file:
        stream = _stream(file)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        total = sum(1 for packet in file.demux(stream) if packet.size)
    if not total:
        raise Refused("it has no frames; send a video with some")
    return total, rate


def _frames(library: Any, source: FileIO, container: str, wanted: set[int], most: int) -> dict[int, NDArray[np.uint8]]:
    """Decodes until the last frame that is wanted -> frames by their numbers. Packets that cannot be decoded are left
    out, as players do."""
    found: dict[int, NDArray[np.uint8]] = {}
    number, last = 0, max(wanted)
    with _open(library, source, container) as file:
        stream = _stream(file)
        size = (0, 0)
        for packet in file.demux(stream):
            try:
                frames = packet.decode()
            except library.error.InvalidDataError:
                continue
            for frame in frames:
                if number in wanted:
                    size = size if found else (frame.width, frame.height)
                    found[number] = _as_array(frame, size, most)
                number += 1
            if number > last:
                break
    return found


def _as_array(frame: Any, size: tuple[int, int], most: int) -> NDArray[np.uint8]:
    """Returns a frame as RGB [H, W, 3], upright; all frames have the first one's size."""
    check_size(frame.width, frame.height)
    width, height = size
    if width * height * 3 > most:
        raise Refused(
            f"its frames have {width} x {height} pixels, which takes {width * height * 3} bytes each, and {most} are "
            'the most for so many; send a smaller video, or set num_frames in media_io_kwargs, such as {"video": '
            '{"num_frames": 8}}'
        )
    picture = np.asarray(frame.to_ndarray(width=width, height=height, format="rgb24"), np.uint8)
    turns = round(getattr(frame, "rotation", 0) / 90)  # counterclockwise degrees of the display matrix
    return np.ascontiguousarray(np.rot90(picture, turns)) if turns else picture
