"""Images as RGB, by Pillow. Only the formats below are tried: Pillow knows others, which start programs."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

from quintet.media.children import shown_error
from quintet.media.decoding.jobs import MAX_PIXELS, WHITE, Refused
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_PLUGINS = ("Png", "Jpeg", "Mpo", "WebP", "Gif", "Bmp", "Tiff", "Avif")  # modules of Pillow; Avif is not in all builds
_ORIENTATION = 0x0112  # EXIF's tag
_TRANSPOSE = {  # orientation -> Pillow's name of what brings the image upright
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_TRANSPARENT = ("RGBA", "RGBa", "LA", "La", "PA")
_NO_IMAGE = f"it is no image of a known format ({', '.join(FORMATS)}); convert it to PNG or JPEG"


def load_pillow() -> None:
    """Imports Pillow and the formats that are read. ImportError without it."""
    importlib.import_module("PIL.Image")
    for name in _PLUGINS:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"PIL.{name}ImagePlugin")


def decode_image(source: BinaryIO, background: tuple[int, int, int] = WHITE) -> NDArray[np.uint8]:
    """Returns the image of a file, or its first frame, [H, W, 3]. Its size is checked before it is decoded.

    Refused says what is wrong; Pillow raises errors of any type for damaged files.
    """
    from PIL import Image, UnidentifiedImageError

    known = [each for each in FORMATS if each in Image.OPEN]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large images and damaged EXIF
        Image.MAX_IMAGE_PIXELS = MAX_PIXELS
        try:
            image = Image.open(source, formats=known)
        except UnidentifiedImageError:
            raise Refused(_NO_IMAGE) from None
        except Image.DecompressionBombError as error:  # over twice as many pixels
            raise Refused(f"it has too many pixels ({shown_error(error)}); send a smaller one") from None
        check_size(*image.size)
        image.load()
        return rgb_array(image, background)


def check_size(width: int, height: int) -> None:
    """Refused if an image or a frame has more pixels than are decoded, or none."""
    if width < 1 or height < 1:
        raise Refused(f"it has {width} x {height} pixels; send one that has some")
    if width * height > MAX_PIXELS:
        raise Refused(f"it has {width} x {height} pixels, and {MAX_PIXELS} are the most; send a smaller one")


def rgb_array(image: Image.Image, background: tuple[int, int, int] = WHITE) -> NDArray[np.uint8]:
    """Returns an image of any mode, upright, [H, W, 3]. Transparent parts have the colour `background`."""
    return np.asarray(_upright(_as_rgb(image, background), image), np.uint8)


def _as_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_bytes(np.asarray(image), image.mode)).convert("RGB")
    if image.mode in _TRANSPARENT or (image.mode in ("P", "L", "RGB") and "transparency" in image.info):
        clear = image.convert("RGBA")
        opaque = Image.new("RGB", clear.size, tuple(background))
        opaque.paste(clear, mask=clear.getchannel("A"))
        return opaque
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_bytes(values: NDArray[Any], mode: str) -> NDArray[np.uint8]:
    """Returns grey of 16 or 32 bits, or of floats from 0 to 1, as 8 bits: Pillow would cut off what is over 255."""
    if mode == "F":
        return np.asarray(np.clip(np.nan_to_num(values), 0, 1) * 255 + 0.5, np.uint8)
    return np.asarray((np.clip(values, 0, 65535).astype(np.uint32) + 128) // 257, np.uint8)


def _upright(image: Image.Image, original: Image.Image) -> Image.Image:
    from PIL import Image

    try:
        turn = _TRANSPOSE.get(original.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF: any type of error, and the image is there
        return image
    return image if turn is None else image.transpose(Image.Transpose[turn])
