"""Pictures that a message of the terminal brings: --image FILE, and /image FILE in a conversation."""

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_PICTURE = 2**26  # bytes of a file; a server takes less (--max-upload-bytes)
HELP = "a picture for the {what}: a file, or an address that the server may fetch; may be repeated"

Content = str | list[dict[str, Any]]


def picture_part(name: str) -> dict[str, Any]:
    """Returns the part of a message for a file or an address. ValueError if it is no picture's file."""
    if name.partition("://")[1]:
        return {"type": "image_url", "image_url": {"url": name}}
    file = Path(name).expanduser()
    kind = mimetypes.guess_type(file.name)[0] or ""
    if not kind.startswith("image/"):
        raise ValueError(f"{name!r} has no name of a picture; give a file such as picture.png or picture.jpg")
    try:
        if file.stat().st_size > MAX_PICTURE:
            raise ValueError(f"{name!r} has more than {MAX_PICTURE} bytes; give a smaller picture")
        data = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"cannot read {name!r}: {error.strerror or error}; give the path of a picture") from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def content_of(text: str, pictures: Sequence[dict[str, Any]]) -> Content:
    """Returns the content of a message: its pictures, and then its text."""
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def is_content(value: Any) -> bool:
    """True for what content_of() returns."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(isinstance(each, dict) and _is_part(each) for each in value)


def _is_part(part: dict[str, Any]) -> bool:
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    picture = part.get("image_url")
    return part.get("type") == "image_url" and isinstance(picture, dict) and isinstance(picture.get("url"), str)
