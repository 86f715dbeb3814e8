"""Options of decoding (media_io_kwargs): the operator's and a request's."""

from collections.abc import Mapping
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.media.decoding.jobs import MAX_FRAMES, WHITE, DecodeJob
from quintet.media.kinds import AUDIO, IMAGE, KINDS, VIDEO

_KEYS = {IMAGE: ("rgba_background_color",), VIDEO: ("num_frames", "fps"), AUDIO: ()}


def merge_io_options(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Returns the options by kind; those of a request go before the operator's. ValueError names a wrong one."""
    refuse_unknown("entry of media_io_kwargs", theirs or {}, KINDS)
    merged = {}
    for kind in KINDS:
        mine, yours = ours.get(kind, {}), (theirs or {}).get(kind, {})
        if not isinstance(yours, Mapping):
            raise ValueError(f"media_io_kwargs.{kind} must be an object, not {str(yours)[:80]!r}")
        merged[kind] = {**mine, **yours}
    return merged


def read_io_options(given: Mapping[str, Mapping[str, Any]]) -> dict[str, DecodeJob]:
    """Returns the jobs of images and videos. ValueError says what is wrong with an option."""
    for kind, options in given.items():
        refuse_unknown(f"entry of media_io_kwargs.{kind}", options, _KEYS[kind])
    image, video = given.get(IMAGE, {}), given.get(VIDEO, {})
    background = image.get("rgba_background_color", WHITE)
    if not isinstance(background, (list, tuple)) or len(background) != 3 or not all(map(_is_byte, background)):
        raise ValueError(
            f"media_io_kwargs.image.rgba_background_color must be 3 numbers from 0 to 255, not {str(background)[:80]}"
        )
    frames, fps = video.get("num_frames", 32), video.get("fps", -1)
    if type(frames) is not int or not (frames == -1 or 1 <= frames <= MAX_FRAMES):
        raise ValueError(
            f"media_io_kwargs.video.num_frames must be a number from 1 to {MAX_FRAMES}, or -1 (all), not "
            f"{str(frames)[:80]}"
        )
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not -1 <= fps <= 1000:
        raise ValueError(f"media_io_kwargs.video.fps must be a number up to 1000, or -1 (any), not {str(fps)[:80]}")
    colour = (int(background[0]), int(background[1]), int(background[2]))
    return {IMAGE: DecodeJob(IMAGE, background=colour), VIDEO: DecodeJob(VIDEO, num_frames=frames, fps=float(fps))}


def _is_byte(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 255
