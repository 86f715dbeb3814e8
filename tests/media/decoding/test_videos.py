"""Frames of videos: which are taken, and that they are what FFmpeg decodes."""

import io
from typing import Any

import av
import numpy as np
import pytest

from quintet.media.decoding.jobs import DecodeJob, Refused
from quintet.media.decoding.videos import decode_video, frame_indices
from quintet.media.items import VIDEO, VideoTimes
from tests.media.decoding.files import video_file


def decoded(content: bytes, **options: Any) -> tuple[Any, VideoTimes]:
    file = io.BytesIO(content)
    return decode_video(av, file, DecodeJob(VIDEO, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["mp4", "matroska", "webm", "avi", "mov"])
def test_frames_are_evenly_spread_and_are_what_the_library_decodes(form: str) -> None:
    content = video_file(40, form)
    found, times = decoded(content, num_frames=8)
    with av.open(io.BytesIO(content)) as file:
        every = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    assert len(every) == 40
    chosen = np.linspace(0, 39, 8, dtype=int)
    assert np.array_equal(found, np.stack([every[each] for each in chosen]))
    assert times == VideoTimes(tuple(chosen.tolist()), 40, 10.0) and times.sampled_rate == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("total", "rate", "num_frames", "fps", "want"),
    [
        (5, 10, 32, -1, [0, 1, 2, 3, 4]), (100, 10, 4, -1, [0, 33, 66, 99]), (100, 10, -1, 1, list(range(0, 100, 11))),
        (100, 10, 1, -1, [0]), (3, 0, -1, 5, [0, 1, 2]), (100, 10, 32, 0.01, [0]), (1, 25, 32, 2, [0]),
    ],
)  # fmt: skip
def test_frames_are_chosen_as_vllm_does(total: int, rate: float, num_frames: int, fps: float, want: list[int]) -> None:
    assert frame_indices(total, rate, num_frames, fps) == want


def test_too_many_and_too_large_frames_are_refused() -> None:
    content = video_file(40)
    with pytest.raises(Refused, match="set num_frames"):
        decoded(content, num_frames=8, max_bytes=64 * 48 * 3 * 8 - 1)
    assert decoded(content, num_frames=8, max_bytes=64 * 48 * 3 * 8)[0].shape == (8, 48, 64, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"x" * 100],
)
def test_playlists_and_other_files_are_refused(content: bytes) -> None:
    with pytest.raises(Refused, match="it is no MP4"):
        decoded(content)


def test_sound_alone_has_no_frames() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        for packet in [*stream.encode(frame), *stream.encode()]:
            out.mux(packet)
    with pytest.raises(Refused, match="no pictures"):
        decoded(file.getvalue())
