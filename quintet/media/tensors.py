"""Rows of numbers that stand in the place of an encoder's output (image_embeds, audio_embeds)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quintet.media.errors import MediaError
from quintet.media.fetch.sources import decode_base64
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_ROWS = 2**16  # of one item; far more than an encoder makes of one
_SLACK = 2**16  # bytes of a file besides its numbers
_FORMS = "base64 of safetensors with one tensor of float32 or float16"


def read_embeds(given: Any, width: int) -> NDArray[np.float32]:
    """Returns finite rows [rows, width] of an array, a torch tensor, or base64 of safetensors.

    MediaError says what is wrong; `width` 0: none are taken.
    """
    if not width:
        raise MediaError(
            "it is embeddings, which are not taken here: start with enable_mm_embeds=True (--enable-mm-embeds); where "
            "positions follow from an image's grid, this model takes none"
        )
    array = _safetensors(given, width) if isinstance(given, str) else _array(given)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != width or not 1 <= array.shape[0] <= MAX_ROWS:
        shape = list(array.shape)
        raise MediaError(f"it has embeddings of the shape {shape}, and must have [1 to {MAX_ROWS} rows, {width}]")
    if array.dtype.kind != "f":
        raise MediaError(f"it has embeddings of {array.dtype}, and must have floats")
    rows = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(rows).all():
        raise MediaError("it has embeddings that are NaN or infinite; send finite ones")
    return rows


def _array(given: Any) -> NDArray[Any]:
    if hasattr(given, "detach"):  # a torch tensor
        given = given.detach().cpu().float().numpy()
    if not isinstance(given, np.ndarray):
        raise MediaError(f"it has embeddings of the type {type(given).__name__}, and must have an array or a tensor")
    return given


def _safetensors(text: str, width: int) -> NDArray[Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = decode_base64(text, 4 * width * MAX_ROWS + _SLACK)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MediaError(f"it must be {_FORMS} ({str(error)[:200]})") from None
    if len(tensors) != 1:
        raise MediaError(f"it must be {_FORMS}: this one has {len(tensors)} tensors")
    array: NDArray[Any] = next(iter(tensors.values()))
    return array
