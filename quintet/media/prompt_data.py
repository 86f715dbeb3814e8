"""Media that a caller of the Python API gives beside a prompt: multi_modal_data, multi_modal_uuids and the like."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintet.media.items import IMAGE, DecodedMedia, MediaProcessor, ProcessedPrompt

KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")  # of a prompt that is a dict
MAX_SIDE = 2**15  # pixels
_FORM = "Pillow images or uint8 arrays [height, width, 3], one or a list"


@dataclass
class PromptMedia:
    """Makes prompts with media ready; the model's processor is loaded by the first of them."""

    load: Callable[[], MediaProcessor]

    @functools.cached_property
    def processor(self) -> MediaProcessor:
        """The model's processor."""
        return self.load()

    def process(
        self, prompt: str | Sequence[int], given: Mapping[str, Any], salt: str | None
    ) -> ProcessedPrompt | None:
        """Returns the prompt's tokens and media; None if it has no media. `given`: entries of KEYS. `salt`:
        cache_salt, which keeps the names of one tenant's media apart from those of others. ValueError: see
        MediaProcessor."""
        options = given.get("mm_processor_kwargs") or {}
        if not isinstance(options, Mapping):
            raise ValueError(f"'mm_processor_kwargs' is of type {type(options).__name__}, and must be a dict")
        media = decoded(given.get("multi_modal_data"), given.get("multi_modal_uuids"), salt)
        return self.processor.process(prompt, media, options) if media else None


def decoded(data: Any, uuids: Any, salt: str | None) -> list[DecodedMedia]:
    """Checks multi_modal_data and multi_modal_uuids. ValueError says what is wrong."""
    for name, value in (("multi_modal_data", data), ("multi_modal_uuids", uuids)):
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(
                f"{name!r} is of type {type(value).__name__}, and must be a dict, such as {{'image': ...}}"
            )
        if unknown := [key for key, each in (value or {}).items() if key != IMAGE and each not in (None, [])]:
            raise ValueError(f"{name!r} has {unknown[0]!r}, and images alone are served: {{'image': ...}}")
    given = (data or {}).get(IMAGE)
    pictures = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    named = (uuids or {}).get(IMAGE)
    names = [None] * len(pictures) if named is None else list(named) if isinstance(named, (list, tuple)) else [named]
    if len(names) != len(pictures):
        raise ValueError(f"'multi_modal_uuids' has {len(names)} names for {len(pictures)} images; give one for each")
    return [_image(each, _uuid(name, salt), at) for at, (each, name) in enumerate(zip(pictures, names, strict=True))]


def _uuid(name: Any, salt: str | None) -> str:
    if name is None:
        return ""
    if not isinstance(name, str) or not name:
        raise ValueError(f"'multi_modal_uuids' must be text that is not empty, or None, not {name!r}")
    return f"{salt or ''}\0{name}"


def _image(given: Any, uuid: str, at: int) -> DecodedMedia:
    if hasattr(given, "convert") and hasattr(given, "size") and not isinstance(given, np.ndarray):  # Pillow's
        given = np.asarray(given.convert("RGB"))
    if not isinstance(given, np.ndarray):
        raise ValueError(f"image {at} is of type {type(given).__name__}; give {_FORM}")
    if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
        raise ValueError(f"image {at} is an array {given.dtype} {list(given.shape)}; give {_FORM}")
    if not 0 < min(given.shape) or max(given.shape) > MAX_SIDE:
        raise ValueError(
            f"image {at} has {given.shape[1]} x {given.shape[0]} pixels; each side may have 1 to {MAX_SIDE}"
        )
    return DecodedMedia(IMAGE, given, uuid=uuid)
