"""Reads the bytes that a URL of a request names."""

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from quintet.media.errors import MediaError
from quintet.media.fetch.http import FetchRules, fetch
from quintet.media.info import TIMEOUTS
from quintet.media.items import AUDIO, IMAGE, VIDEO

MAX_BYTES = {IMAGE: 2**26, VIDEO: 2**28, AUDIO: 2**26}  # of one file, as it comes
FRAMES_TYPE = "video/jpeg"  # of a data: URL that has JPEG files with commas between, as vLLM's clients send frames
_MAX_HEAD = 256  # characters of a data: URL before its comma
_ANY_TYPES = ("", "application/octet-stream")
_WHAT = {IMAGE: "an image", VIDEO: "a video", AUDIO: "a recording"}
_SPACES = str.maketrans("", "", " \t\r\n")


@dataclass(frozen=True)
class MediaSources:
    """Sources of the bytes of media: the request itself, files of one folder, hosts."""

    rules: FetchRules = FetchRules()
    local_path: str | None = None  # folder of file:// URLs
    timeouts: Mapping[str, float] = field(default_factory=lambda: dict(TIMEOUTS))  # kind -> seconds

    def read(self, kind: str, url: str) -> list[bytes]:
        """Returns the file that a URL names; of a video that is sent as frames, each of them.

        MediaError says what is not allowed, missing, or too large.
        """
        scheme = url[:8].partition(":")[0].lower() if ":" in url[:8] else ""
        if scheme == "data":
            return _data_url(kind, url)
        if scheme in ("http", "https"):
            return [fetch(url, self.rules, MAX_BYTES[kind], self.timeouts[kind])]
        if scheme == "file":
            return [self._file(kind, url)]
        raise MediaError(
            f"its URL must be a data: URL such as data:{kind}/...;base64,..., or an http, https or file URL, not "
            f"{url[:40]!r}"
        )

    def _file(self, kind: str, url: str) -> bytes:
        if self.local_path is None:
            raise MediaError("it is a file:// URL, and no folder of files is allowed here (--allowed-local-media-path)")
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise MediaError("its URL must name a file of this machine, such as file:///folder/picture.png")
        try:
            folder, file = Path(self.local_path).resolve(), Path(path).resolve()
        except (OSError, RuntimeError):  # links that lead to each other
            raise _no_file() from None
        if not file.is_relative_to(folder):
            raise MediaError("it names a file outside of the folder that is allowed (--allowed-local-media-path)")
        return _read_file(file, MAX_BYTES[kind])


def _read_file(path: Path, most: int) -> bytes:
    """Reads a file. Pipes and devices are opened without waiting, and refused."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        raise _no_file() from None
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise _no_file()
    with os.fdopen(number, "rb") as file:
        if status.st_size > most:
            raise MediaError(f"it has {status.st_size} bytes, and {most} is the most; give a smaller file")
        content = file.read(most + 1)
    if len(content) > most:
        raise MediaError(f"it has more than {most} bytes; give a smaller file")
    return content


def _no_file() -> MediaError:
    return MediaError("it names no file that can be read; look at its path and its rights")


def _data_url(kind: str, url: str) -> list[bytes]:
    comma = url.find(",", 0, _MAX_HEAD)
    if comma < 0:
        raise MediaError(f"it is a data: URL without a comma; write data:{kind}/...;base64,...")
    media_type, *options = (each.strip() for each in url[5:comma].lower().split(";"))
    if "base64" not in options:
        raise MediaError(f"it is a data: URL that is not base64; write data:{kind}/...;base64,...")
    _check_type(kind, media_type)
    if kind == VIDEO and media_type == FRAMES_TYPE:
        most = MAX_BYTES[kind] // 4 * 3
        if len(url) > most // 3 * 4:
            raise MediaError(f"it has frames of more than {most} bytes; send fewer")
        return [decode_base64(each, most) for each in url[comma + 1 :].split(",")]
    return [decode_base64(url[comma + 1 :], MAX_BYTES[kind])]


def _check_type(kind: str, media_type: str) -> None:
    if media_type.startswith("image/svg"):
        raise MediaError("it is an SVG drawing, which is not rendered here; send it as PNG")
    # MP4 and WebM files of sound alone are often called videos, and Ogg files an application's
    fits = {IMAGE: ("image/",), VIDEO: ("video/",), AUDIO: ("audio/", "video/", "application/ogg")}[kind]
    if media_type not in _ANY_TYPES and not media_type.startswith(fits):
        raise MediaError(f"it is of the type {media_type[:60]!r}, and {_WHAT[kind]} is wanted; send one as {kind}/...")


def decode_base64(text: str, most: int) -> bytes:
    """Decodes base64 of at most `most` bytes; line breaks are left out. MediaError for other characters."""
    if len(text) > 2 * most:
        raise MediaError(f"it has more than {most} bytes; send a smaller one")
    try:
        content = base64.b64decode(text.translate(_SPACES), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(
            f"it is not base64 ({str(error)[:100]}); encode the file's bytes as base64 (RFC 4648)"
        ) from None
    if not content:
        raise MediaError("it is empty; send a file")
    if len(content) > most:
        raise MediaError(f"it has {len(content)} bytes, and {most} is the most; send a smaller one")
    return content
