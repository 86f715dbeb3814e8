"""Images of all modes as RGB, compared with Pillow's own conversions, and what is refused by the header."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from quintet.media.decoding import images
from quintet.media.decoding.images import decode_image, rgb_array
from quintet.media.decoding.jobs import MAX_PIXELS, Refused
from tests.helpers.media_files import picture_file, png_bomb

FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]


def decoded(content: bytes, **options: Any) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    images.load_pillow()
    return decode_image(io.BytesIO(content), **options)


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_what_pillow_has_as_rgb(form: str) -> None:
    content = picture_file(form, (9, 5))
    found = decoded(content)
    assert found.shape == (5, 9, 3) and found.dtype == np.uint8
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "LAB"])
def test_each_mode_without_transparency_is_what_pillow_has_as_rgb(mode: str) -> None:
    image = Image.open(io.BytesIO(picture_file())).convert(mode)
    assert np.array_equal(rgb_array(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGBa", "PA"])
def test_transparent_parts_are_white_or_the_colour_that_is_asked_for(mode: str) -> None:
    clear = Image.new("RGBA", (4, 3), (200, 100, 50, 0))
    half = Image.new("RGBA", (4, 3), (200, 100, 50, 255))
    if mode == "PA":
        clear, half = (image.convert("RGB").convert("P") for image in (clear, half))
        clear.putalpha(0)
        half.putalpha(255)
    else:
        clear, half = clear.convert(mode), half.convert(mode)
    assert (clear.mode, half.mode) == (mode, mode)
    assert (rgb_array(clear) == 255).all()
    assert (rgb_array(clear, (1, 2, 3)) == [1, 2, 3]).all()
    assert np.array_equal(rgb_array(half), np.asarray(half.convert("RGBA").convert("RGB")))


def test_half_transparent_is_as_pillow_blends_it() -> None:
    image = Image.new("RGBA", (2, 2), (0, 100, 200, 77))
    white = Image.new("RGBA", (2, 2), "white")
    assert np.array_equal(rgb_array(image), np.asarray(Image.alpha_composite(white, image).convert("RGB")))


def test_a_palette_with_a_transparent_colour_is_white_there() -> None:
    file = io.BytesIO()
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.save(file, "PNG", transparency=0)
    assert decoded(file.getvalue()).tolist() == [[[255, 255, 255], [40, 50, 60]]]


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    for form in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(values).save(file, form)
        assert decoded(file.getvalue())[0, :, 0].tolist() == [0, 1, 128, 255]
    floats = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan, 9.0]], np.float32))
    assert rgb_array(floats)[0, :, 1].tolist() == [0, 128, 255, 0, 255]


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns_it_upright_as_pillow_does(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    content = picture_file("JPEG", (16, 8), exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert np.array_equal(decoded(content), np.asarray(upright))


def test_damaged_exif_leaves_the_picture_as_it_is() -> None:
    content = picture_file("JPEG", (16, 8), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\3\0\0\0\1")
    assert decoded(content).shape == (8, 16, 3)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    first, second = Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")
    for form in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        first.save(file, form, save_all=True, append_images=[second], lossless=True)
        assert decoded(file.getvalue())[0, 0, 0] > 200, form


@pytest.mark.parametrize("size", [(2**16, 2**16), (MAX_PIXELS // 4 + 1, 4), (2**31 - 1, 1), (1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header(size: tuple[int, int]) -> None:
    """Nothing of them could be decoded: the data ends after some bytes."""
    with pytest.raises(Refused, match="pixels"):
        decoded(png_bomb(*size))


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
     b"%PDF-1.7", b"P6 2 2 255 " + b"x" * 12, b"8BPS" + b"\0" * 100, b"\0" * 1000, b"GIF89a", b"\x89PNG\r\n\x1a\n"],
)  # fmt: skip
def test_other_files_are_none(content: bytes) -> None:
    """Among them are formats that Pillow knows, some of which start programs."""
    with pytest.raises(Exception) as error:  # Pillow's, for a header that is cut off
        decoded(content)
    assert isinstance(error.value, (Refused, OSError, SyntaxError, ValueError))
