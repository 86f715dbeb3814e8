"""Videos for tests."""

import functools
import io

import av
import numpy as np

_CODECS = {"webm": "libvpx", "avi": "mpeg4", "matroska": "mpeg4", "mp4": "mpeg4", "mov": "mpeg4"}


@functools.cache
def video_file(frames: int, form: str = "mp4", size: tuple[int, int] = (64, 48)) -> bytes:
    """Returns a video of 10 frames a second, each of its own brightness."""
    file = io.BytesIO()
    width, height = size
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(_CODECS[form], rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = np.full((height, width, 3), number * 255 // max(frames - 1, 1), np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return file.getvalue()
