"""Decoded media as transformers' processors take them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintet.media.audio.resample import MAX_RATE, MIN_RATE, resample
from quintet.media.families import KindFacts
from quintet.media.items import AUDIO, IMAGE, VIDEO, DecodedMedia, VideoTimes

SAMPLING = "do_sample_frames"  # option of video processors: they choose frames by themselves


def processor_input(media: DecodedMedia, part: Any, facts: KindFacts) -> Any:
    """Returns a picture as Pillow's object, a video as an array of frames, and sound at the rate of the processor's
    part. ValueError if it is not taken."""
    if media.kind == IMAGE:
        return _picture(media.data)
    return np.array(media.data) if media.kind == VIDEO else _sound(media, part, facts)  # torch may write to it


def call_options(media: DecodedMedia, part: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a call with this item: those of a request go before ours."""
    if media.kind == IMAGE:
        return dict(options)
    if media.kind == AUDIO:
        return {"sampling_rate": part.sampling_rate, **options}
    chosen = {SAMPLING: False, **options}  # frames were chosen when the file was decoded
    return {"video_metadata": [_metadata(media, bool(chosen[SAMPLING]))], "input_data_format": "channels_last",
            **chosen}  # fmt: skip


def blank(kind: str, samples: int) -> Any:
    """Returns an item in the place of one whose results are there already. `samples`: of a recording, whose length a
    processor may write into the text."""
    if kind == AUDIO:
        return np.zeros(samples or 160, np.float32)
    return _picture(np.zeros((8, 8, 3), np.uint8)) if kind == IMAGE else np.zeros((2, 8, 8, 3), np.uint8)


def _picture(data: NDArray[Any]) -> Any:
    """uint8 [H, W, 3] -> Pillow's object, which says by itself where its channels are."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(data))


def _metadata(media: DecodedMedia, samples: bool) -> dict[str, Any]:
    """Returns a video's times, as transformers names them. `samples`: the processor takes frames out of `data`, whose
    numbers they are then."""
    times, count = media.times, len(media.data)
    if times is None or samples:
        times = VideoTimes(tuple(range(count)), count, media.rate)
    return {
        "total_num_frames": times.total,
        "fps": times.rate or None,
        "duration": times.total / times.rate if times.rate else None,
        "height": media.data.shape[1],
        "width": media.data.shape[2],
        "frames_indices": list(times.frames),
    }


def _sound(media: DecodedMedia, part: Any, facts: KindFacts) -> NDArray[np.float32]:
    rate, wanted = media.rate, int(part.sampling_rate)
    if rate % 1 or not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(
            f"a recording has {rate:g} samples a second, and whole numbers from {MIN_RATE} to {MAX_RATE} are taken; "
            "convert it before"
        )
    seconds = len(media.data) / rate
    longest = part.chunk_length if facts.cut else facts.seconds
    if seconds > longest > 0:
        raise ValueError(
            f"a recording has {seconds:.1f} s, and this model hears {longest:g} s; cut it, and give the "
            "pieces as several"
        )
    return resample(media.data, int(rate), wanted)
