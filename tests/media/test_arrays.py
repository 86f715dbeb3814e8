"""multi_modal_data of Python callers: Pillow's images, arrays and tensors in their forms, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quintet.media.arrays import parts_of_data
from quintet.media.errors import MediaError
from quintet.media.items import VideoTimes

PIXELS = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3)
FRAMES = np.stack([PIXELS, PIXELS + 100])


def arrays(data: Any, uuids: Any = None) -> list[tuple[str, tuple[int, ...]]]:
    return [(part.kind, part.media.data.shape) for part in parts_of_data(data, uuids) if part.media]


@pytest.mark.parametrize(
    "image",
    [Image.fromarray(PIXELS), PIXELS, PIXELS.transpose(2, 0, 1), torch.from_numpy(PIXELS), np.asfortranarray(PIXELS)],
    ids=["pillow", "array", "channels first", "tensor", "fortran"],
)
def test_an_image_in_any_form_is_the_same(image: Any) -> None:
    for data in ({"image": image}, {"image": [image]}, {"image": (image,)}):
        [part] = parts_of_data(data)
        assert part.media is not None and np.array_equal(part.media.data, PIXELS)


def test_grey_is_rgb() -> None:
    grey = PIXELS[..., 0]
    for image in (grey, grey[..., None], Image.fromarray(grey)):
        [part] = parts_of_data({"image": image})
        assert part.media is not None and np.array_equal(part.media.data, np.stack([grey] * 3, -1))


def test_kinds_come_in_one_order_and_each_in_its_own() -> None:
    data = {"audio": (np.zeros(5, np.float32), 8000), "video": FRAMES, "image": [PIXELS, PIXELS[:1]]}
    assert arrays(data) == [("image", (2, 4, 3)), ("image", (1, 4, 3)), ("video", (2, 2, 4, 3)), ("audio", (5,))]
    assert arrays({"image": np.stack([PIXELS] * 3)}) == [("image", (2, 4, 3))] * 3
    assert arrays({"image": None, "video": []} | {"video": None}) == []


def test_videos_are_arrays_or_lists_of_frames() -> None:
    for video in (FRAMES, list(FRAMES), [Image.fromarray(each) for each in FRAMES], (FRAMES, {"fps": 4.0})):
        [part] = parts_of_data({"video": video})
        assert part.media is not None and np.array_equal(part.media.data, FRAMES)
        assert part.media.rate == (4.0 if isinstance(video, tuple) else 0.0)
    assert arrays({"video": [FRAMES, FRAMES[:1]]}) == [("video", (2, 2, 4, 3)), ("video", (1, 2, 4, 3))]


def test_a_videos_times_are_those_of_its_metadata() -> None:
    def times(**metadata: Any) -> VideoTimes | None:
        [part] = parts_of_data({"video": (FRAMES, metadata)})
        return part.media.times if part.media else None

    assert times(fps=4) == VideoTimes((0, 1), 2, 4.0)
    assert times(fps=4, total_num_frames=9) == VideoTimes((0, 8), 9, 4.0)
    assert times(fps=4, frames_indices=np.array([3, 7])) == VideoTimes((3, 7), 8, 4.0)
    assert times(fps=4, frames_indices=[3, 7], total_num_frames=50) == VideoTimes((3, 7), 50, 4.0)
    for wrong in (
        {"fps": -1}, {"fps": "fast"}, {"fps": float("nan")}, {"frames_indices": [1]}, {"frames_indices": [3, 3]},
        {"frames_indices": [3, 7], "total_num_frames": 7}, {"total_num_frames": 1}, {"frames_indices": "ab"},
    ):  # fmt: skip
        with pytest.raises(MediaError, match="its metadata have"):
            times(**wrong)


def test_recordings_have_their_rate() -> None:
    sound = np.linspace(-1, 1, 7)
    for audio, rate in (
        (sound, 16000),
        ((sound, 8000), 8000),
        ((torch.from_numpy(sound), 44100.0), 44100),
        (sound[None], 16000),
    ):
        [part] = parts_of_data({"audio": audio})
        assert part.media is not None and part.media.rate == rate and part.media.data.dtype == np.float32
    assert arrays({"audio": [(sound, 8000), sound]}) == [("audio", (7,))] * 2


def test_names_are_kept_apart_by_the_salt() -> None:
    data = {"image": [PIXELS, PIXELS]}
    assert [part.uuid for part in parts_of_data(data, {"image": ["a", None]}, "tenant")] == ["tenant\0a", ""]
    for wrong in ({"image": ["a"]}, {"image": ["a", 5]}, {"smell": ["a"]}, "a", {"image": ["a" * 300, None]}):
        with pytest.raises(MediaError):
            parts_of_data(data, wrong)


@pytest.mark.parametrize(
    "data",
    [
        "x", {"smell": PIXELS}, {"image": "picture.png"}, {"image": b"bytes"}, {"image": PIXELS.astype(np.float32)},
        {"image": PIXELS.astype(np.int64)}, {"image": np.zeros((2, 3, 5), np.uint8)},
        {"image": np.zeros((0, 3, 3), np.uint8)},
        {"image": np.zeros((9000, 9000, 1), np.uint8)}, {"image": [None]}, {"image": np.zeros(3, np.uint8)},
        {"image": {"pixels": PIXELS}}, {"image": object()}, {"video": [PIXELS, PIXELS[:1]]}, {"video": PIXELS[..., 0]},
        {"video": np.zeros((2000, 1, 1, 3), np.uint8)}, {"video": "x"}, {"audio": "x"},
        {"audio": np.zeros(0, np.float32)},
        {"audio": np.array([np.nan])}, {"audio": np.zeros((2, 5))}, {"audio": np.zeros(5, np.int16)},
        {"audio": (np.zeros(5), 0)}, {"audio": (np.zeros(5), "fast")}, {"audio": (np.zeros(5), 10**9)},
    ],
)  # fmt: skip
def test_other_things_are_refused_with_the_place(data: Any) -> None:
    with pytest.raises(MediaError) as error:
        parts_of_data(data)
    assert error.value.where.startswith("multi_modal_data") and "\n" not in str(error.value)
