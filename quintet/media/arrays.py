"""Media that a Python caller has decoded already: Pillow's images, arrays, tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quintet.media.audio import SAMPLE_RATE
from quintet.media.decoding.images import check_size, rgb_array
from quintet.media.decoding.jobs import MAX_DECODED_BYTES, MAX_FRAMES, Refused
from quintet.media.errors import MediaError
from quintet.media.items import AUDIO, IMAGE, VIDEO, DecodedMedia, VideoTimes
from quintet.media.lazy_numpy import np
from quintet.media.parts import MAX_UUID, MediaPart

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEYS = {IMAGE: IMAGE, "images": IMAGE, VIDEO: VIDEO, "videos": VIDEO, AUDIO: AUDIO, "audios": AUDIO}
_FORMS = {
    IMAGE: "a Pillow image or a uint8 array [H, W, 3]",
    VIDEO: "a uint8 array [frames, H, W, 3] or a list of frames, alone or with its metadata, such as "
    "(frames, {'fps': 2.0})",
    AUDIO: "a float array [samples], or (array, samples a second)",
}
_MAX_RATE = 768_000  # samples a second
_MAX_FPS = 1000  # frames a second of a video


def parts_of_data(data: Any, uuids: Any = None, salt: str = "") -> list[MediaPart]:
    """Returns the media of a prompt's multi_modal_data: images, then videos, then recordings, each in order.

    `uuids`: multi_modal_uuids, a name or None for each of a kind; `salt` keeps the names of one tenant's media apart
    from those of others. MediaError says what is wrong.
    """
    if not isinstance(data, Mapping):
        raise MediaError(f"it must be a dict such as {{'image': image}}, not {type(data).__name__}", "multi_modal_data")
    if wrong := next((str(key) for key in data if key not in _KEYS), None):
        raise MediaError(f"it has {wrong[:80]!r}, and its keys are image, video and audio", "multi_modal_data")
    names = _uuids(uuids)
    parts: list[MediaPart] = []
    for key, given in sorted(data.items(), key=lambda each: list(_KEYS).index(each[0])):
        kind = _KEYS[key]
        items = _items(kind, given)
        given_names = names.get(kind) or [None] * len(items)
        if len(given_names) != len(items):
            problem = f"it has {len(given_names)} names for {len(items)} items; give one, or None, for each"
            raise MediaError(problem, f"multi_modal_uuids.{kind}")
        for at, (item, uuid) in enumerate(zip(items, given_names, strict=True)):
            part = _part(kind, item, f"multi_modal_data.{key}[{at}]", uuid)
            parts.append(replace(part, uuid=f"{salt}\0{part.uuid}") if part.uuid else part)
    return parts


def image_part(given: Any, where: str, uuid: str = "") -> MediaPart:
    """Returns a part of a Pillow image or a uint8 array."""
    return _part(IMAGE, given, where, uuid)


def _uuids(given: Any) -> dict[str, list[Any]]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or any(key not in _KEYS for key in given):
        raise MediaError("it must be a dict such as {'image': ['a name', None]}", "multi_modal_uuids")
    return {_KEYS[key]: list(each) if isinstance(each, (list, tuple)) else [each] for key, each in given.items()}


def _items(kind: str, given: Any) -> list[Any]:
    """Returns the items of one kind: a single one may stand without a list."""
    if given is None:
        return []
    if isinstance(given, Mapping):  # vLLM's form of embeddings
        return [given]
    if kind == VIDEO:
        several = isinstance(given, (list, tuple)) and len(given) > 0 and (
            isinstance(given[0], (list, tuple)) or getattr(given[0], "ndim", 0) == 4
        )  # fmt: skip
        return list(given) if several and not _with_metadata(given) else [given]
    if kind == AUDIO:
        return list(given) if isinstance(given, list) and not _is_numbers(given) else [given]
    if isinstance(given, (list, tuple)):
        return list(given)
    return list(given) if getattr(given, "ndim", 0) == 4 else [given]


def _is_numbers(given: Sequence[Any]) -> bool:
    return bool(given) and isinstance(given[0], (int, float))


def _with_metadata(given: Any) -> bool:
    """True for (frames, metadata) of one video."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)


def _part(kind: str, item: Any, where: str, uuid: Any) -> MediaPart:
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > MAX_UUID):
        raise MediaError(f"it has a name (uuid) that is no text of up to {MAX_UUID} characters", where)
    name = uuid or ""
    if item is None:
        raise MediaError("it is None; media are not kept by their names (uuid) alone: give the item, too", where)
    try:
        if kind == IMAGE:
            if (rows := _embeds(item)) is not None:
                return MediaPart(kind, where, embeds=rows, uuid=name)
            return MediaPart(kind, where, media=DecodedMedia(IMAGE, _image(item)), uuid=name)
        if kind == VIDEO:
            return MediaPart(kind, where, media=_video(item), uuid=name)
        if isinstance(item, Mapping):
            return MediaPart(kind, where, embeds=_embeds(item), uuid=name)
        return MediaPart(kind, where, media=_audio(item), uuid=name)
    except Refused as error:
        raise MediaError(str(error), where) from None
    except MediaError as error:
        error.where = where
        raise


def _embeds(item: Any) -> Any:
    """Returns rows that stand in the place of an encoder's output: floats with two dimensions."""
    if isinstance(item, Mapping):
        names = [key for key in item if key in ("image_embeds", "audio_embeds")]
        if len(names) != 1 or len(item) != 1:
            raise MediaError(f"it is a dict with {', '.join(map(str, item))}; give {{'image_embeds': rows}}")
        return item[names[0]]
    array = _as_array(item)
    return array if array is not None and array.ndim == 2 and array.dtype.kind == "f" else None


def _as_array(item: Any) -> NDArray[Any] | None:
    """Returns an array or a torch tensor as an array, None for all else."""
    if isinstance(item, np.ndarray):
        return item
    if hasattr(item, "detach") and hasattr(item, "is_floating_point"):
        tensor = item.detach().cpu()
        return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)
    return None


def _image(item: Any) -> NDArray[np.uint8]:
    if type(item).__module__.partition(".")[0] == "PIL":
        check_size(*item.size)
        return rgb_array(item)
    array = _as_array(item)
    if array is None:
        raise MediaError(f"it is of the type {type(item).__name__}, and {_FORMS[IMAGE]} is wanted")
    return _pixels(array, IMAGE)


def _pixels(array: NDArray[Any], kind: str) -> NDArray[np.uint8]:
    """Returns one picture as [H, W, 3]: grey and channels first are taken, too."""
    if array.dtype != np.uint8:
        raise MediaError(f"it is an array of {array.dtype}, and {_FORMS[kind]} is wanted; scale it to 0 .. 255")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] not in (1, 3):
        raise MediaError(f"it is an array of the shape {list(array.shape)}, and {_FORMS[kind]} is wanted")
    check_size(array.shape[1], array.shape[0])
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))


def _video(item: Any) -> DecodedMedia:
    metadata: Mapping[str, Any] = {}
    if _with_metadata(item):
        item, metadata = item
    array = _as_array(item)
    frames = list(item if array is None and isinstance(item, (list, tuple)) else array if array is not None else [])
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise MediaError(f"it has {len(frames)} frames, and 1 to {MAX_FRAMES} are taken: {_FORMS[VIDEO]} is wanted")
    pictures = [_image(each) for each in frames]
    if any(each.shape != pictures[0].shape for each in pictures):
        raise MediaError("its frames have several sizes; give them one")
    if len(pictures) * pictures[0].nbytes > MAX_DECODED_BYTES:
        raise MediaError(f"it takes more than {MAX_DECODED_BYTES} bytes; give fewer or smaller frames")
    times = _times(metadata, len(pictures))
    return DecodedMedia(VIDEO, np.stack(pictures), times.sampled_rate, times=times)


def _times(metadata: Mapping[str, Any], count: int) -> VideoTimes:
    """Returns a video's times of the metadata that vLLM's callers give: fps of the file, total_num_frames and
    frames_indices. Without these two, the frames are all of it; without the last, they are evenly spread."""
    rate, total = metadata.get("fps") or 0.0, metadata.get("total_num_frames")
    given = metadata.get("frames_indices")
    if given is None:
        given = np.linspace(0, total - 1, count, dtype=int) if type(total) is int and total > count else range(count)
    frames = _as_list(given)
    if total is None and frames and type(frames[-1]) is int:
        total = frames[-1] + 1
    numbers = [-1, *frames, total]
    rising = all(type(each) is int for each in numbers) and all(a < b for a, b in itertools.pairwise(numbers))
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= _MAX_FPS:
        raise MediaError(f"its metadata have fps={str(rate)[:40]}, and a number from 0 to {_MAX_FPS} is wanted")
    if total is None or len(frames) != count or not rising:
        raise MediaError(
            f"its metadata have frames_indices {str(frames)[:80]} of total_num_frames {str(total)[:40]}, and a rising "
            f"number below the total is wanted for each of {count} frames"
        )
    return VideoTimes(tuple(frames), total, float(rate))


def _as_list(given: Any) -> list[Any]:
    found = given.tolist() if hasattr(given, "tolist") else given
    return found if isinstance(found, list) else list(found) if isinstance(found, (tuple, range)) else []


def _audio(item: Any) -> DecodedMedia:
    rate: Any = SAMPLE_RATE
    if isinstance(item, (tuple, list)) and len(item) == 2 and not _is_numbers(item):
        item, rate = item
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1 <= rate <= _MAX_RATE:
        raise MediaError(f"it has {str(rate)[:40]} samples a second, and 1 to {_MAX_RATE} are taken")
    array = np.asarray(item, np.float32) if isinstance(item, (list, tuple)) and _is_numbers(item) else _as_array(item)
    if array is None:
        raise MediaError(f"it is of the type {type(item).__name__}, and {_FORMS[AUDIO]} is wanted")
    if array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    if array.ndim != 1 or not array.size or array.dtype.kind != "f":
        shown = f"{array.dtype} {list(array.shape)}"
        raise MediaError(f"it is an array {shown}, and {_FORMS[AUDIO]} is wanted")
    samples = np.ascontiguousarray(array, np.float32)
    if samples.nbytes > MAX_DECODED_BYTES or not np.isfinite(samples).all():
        raise MediaError(f"it has samples that are not finite, or takes more than {MAX_DECODED_BYTES} bytes")
    return DecodedMedia(AUDIO, samples, float(rate))
