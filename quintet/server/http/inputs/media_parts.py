"""Parts of a response's input that are images or audio."""

from collections.abc import Mapping
from typing import Any

from quintet.chat.media.parts import DETAILS, read_part
from quintet.chat.validation import one_of, refuse_fields, text_of
from quintet.media.parts import MediaPart
from quintet.sampling_params import ParameterError

MEDIA_PARTS = ("input_image", "input_audio")
_KEYS = {
    "input_image": ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"),
    "input_audio": ("type", "input_audio", "prompt_cache_breakpoint"),
}


def read_media_part(part: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Returns the part as the API returns it. Its URL is not looked at yet. Raises ParameterError."""
    kind = part["type"]
    refuse_fields(part, _KEYS[kind], where)
    if role not in ("user", "tool"):
        raise ParameterError(where, f"of type {kind} belongs to the role user, not to {role}")
    if kind == "input_audio":
        read_part(part, where)
        return {"type": kind, "input_audio": dict(part["input_audio"])}
    if part.get("file_id") is not None:
        raise ParameterError(f"{where}.file_id", "names a file, and none are kept here; give image_url, as a data: URL")
    detail = part.get("detail")
    detail = "auto" if detail is None else one_of(detail, f"{where}.detail", DETAILS)
    return {"type": kind, "image_url": text_of(part.get("image_url"), f"{where}.image_url"), "detail": detail}


def as_media(part: Mapping[str, Any]) -> MediaPart:
    """Returns the medium of a part that was read."""
    if part["type"] == "input_audio":
        return read_part(part, "input")
    return read_part({"type": "image_url", "image_url": part["image_url"]}, "input")
