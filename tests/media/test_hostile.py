"""Thousands of damaged files and hostile URLs: each is an image, or one error of one line; and nothing is fetched."""

import base64
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from quintet.media.decoding.decoder import MediaDecoder
from quintet.media.decoding.jobs import MAX_PIXELS
from quintet.media.errors import MediaError
from quintet.media.info import MediaInfo
from quintet.media.parts import MediaPart
from quintet.media.reader import MediaReader
from tests.helpers.media_files import data_url, picture_file, png_bomb

FORMS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
WHOLE = picture_file("PNG", (9, 5))
HOSTS = ("localhost", "127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "0", "2130706433", "0x7f.1", "example.com",
         "example.com@127.0.0.1", "127.0.0.1#example.com", "example.com.", "EXAMPLE.COM:22",
         "[::ffff:127.0.0.1]")  # fmt: skip
SCHEMES = ("http", "https", "HTTP", "file", "ftp", "gopher", "data", "jar", "dict", "ldap", "")


@pytest.fixture(scope="module")
def read() -> Iterator[MediaReader]:
    made = MediaReader(MediaInfo({"image": 9}), decoder=MediaDecoder())
    yield made
    made.close()


def damaged(chance: random.Random) -> bytes:
    """Returns a file that was cut, changed, joined with another, or made to be large."""
    form = chance.choice(FORMS)
    size = (chance.randint(1, 40), chance.randint(1, 40))
    content = bytearray(picture_file(form, size, chance.choice(("RGB", "L"))))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(content))
        kind = chance.randrange(6)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            content[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\1\0\0"))
        elif kind == 3:
            content[at:at] = content[chance.randrange(len(content)) :][:200]
        elif kind == 4:
            content[:at] = picture_file(chance.choice(FORMS), (3, 3))[:at]
        else:
            content += bytes(chance.randrange(256) for _ in range(20))
        if not content:
            break
    return bytes(content)


def hostile_url(chance: random.Random) -> str:
    """Returns a URL of an image that is damaged, or that names what may not be fetched."""
    kind = chance.randrange(8)
    if kind <= 3:
        return data_url(
            damaged(chance), chance.choice(("image/png", "image/jpeg", "", "image/x", "application/octet-stream"))
        )
    if kind == 4:
        return data_url(png_bomb(chance.choice((1, 2**16, 2**31 - 1)), chance.choice((2**16, 2**20, 2**31 - 1))))
    text = base64.b64encode(WHOLE).decode()
    if kind == 5:
        at = chance.randrange(len(text))
        return (
            "data:image/png;base64,"
            + text[:at]
            + chance.choice(("!", "=", "é", "\0", " ", "-", "", "%"))
            + text[at + 1 :]
        )
    if kind == 6:
        return chance.choice(("data:", "DATA:", "data:;", "data:,", "data:image/png,", "data:text/html;base64,")) + text
    path = chance.choice(("", "/", "/etc/passwd", "/../x", "\\x", "/\r\nHost: x", "/" + "a" * 9000, "?q", "#f"))
    return f"{chance.choice(SCHEMES)}{chance.choice(('://', ':', ':///', ''))}{chance.choice(HOSTS)}{path}"


def check(read: MediaReader, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads a hostile medium of each seed, and a good one now and then, which is not changed by what was before."""

    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("the network was asked")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    good = read.read([MediaPart("image", "good", data_url(WHOLE))])[0].data.tobytes()
    refused = 0
    for seed in seeds:
        url = hostile_url(random.Random(seed))
        try:
            [medium] = read.read([MediaPart("image", "here", url)])
            height, width, channels = medium.data.shape
            assert channels == 3 and 0 < height * width <= MAX_PIXELS, seed
        except MediaError as error:
            refused += 1
            assert error.where == "here" and "\n" not in str(error) and len(str(error)) < 600, (seed, str(error))
        if seed % 100 == 0:
            assert read.read([MediaPart("image", "good", data_url(WHOLE))])[0].data.tobytes() == good, seed
    assert refused > len(seeds) // 2


def test_hostile_media_are_images_or_errors_and_nothing_is_fetched(
    read: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(read, range(400), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(1, 11))
def test_ten_thousand_hostile_media(read: MediaReader, monkeypatch: pytest.MonkeyPatch, thousand: int) -> None:
    check(read, range(1000 * thousand, 1000 * thousand + 1000), monkeypatch)
