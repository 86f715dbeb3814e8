"""Orders for a decoding process, and its answers."""

import msgspec

from quintet.media.items import IMAGE, VideoTimes

MAX_PIXELS = 2**26  # of an image or a frame: 67 million, of which RGB takes 192 MiB
MAX_DECODED_BYTES = 2**29  # of all media of a request, and of one video
MAX_FRAMES = 1024
WHITE = (255, 255, 255)


class DecodeJob(msgspec.Struct):
    """One file to decode."""

    kind: str = IMAGE  # or VIDEO
    max_bytes: int = MAX_DECODED_BYTES  # of the array
    background: tuple[int, int, int] = WHITE  # under transparent parts of an image
    num_frames: int = 32  # of a video, at most; -1: all
    fps: float = -1.0  # frames a second of a video, at most; 0 and less: any


class DecodeReport(msgspec.Struct):
    """The array that was written, or the reason why there is none."""

    shape: list[int] = []
    times: VideoTimes | None = None  # of a video
    error: str = ""
    lacking: str = ""  # the extra that the error is about: its package is not installed


class Refused(Exception):
    """A file that is not decoded. Its text goes to the caller."""
