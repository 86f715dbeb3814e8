"""Encodes embeddings as JSON, base64 or plain bytes, in the dtype and byte order that a request asks for.

Arrays are converted as wholes: base64 and bytes make no Python object per number. NumPy is imported where it is used:
an API process of a model that generates text starts without it.
"""

import base64
import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quintet.server.http.sse import encode

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.float32]]
else:
    Numbers = Any

DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ENDIANNESS = ("native", "little", "big")
FORMATS = ("float", "base64", "bytes", "bytes_only")
COHERE_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")
_INT8 = 127  # int8 value of 1.0


class NumberFormat(NamedTuple):
    """Encoding, dtype and byte order of numbers."""

    encoding: str = "float"  # of FORMATS
    dtype: str = "float32"  # of DTYPES, for all but "float"
    endianness: str = "native"

    def raw(self, x: Numbers) -> bytes:
        """Returns the bytes of the array in row-major order."""
        import numpy as np

        flat = np.ascontiguousarray(x, np.float32).reshape(-1)
        order = {"little": "<", "big": ">"}.get(self.endianness, "=")
        if self.dtype == "float32":
            return flat.astype(f"{order}f4").tobytes()
        if self.dtype == "float16":
            with np.errstate(over="ignore"):
                return flat.astype(f"{order}f2").tobytes()
        if self.dtype == "bfloat16":
            return _bfloat16(flat).astype(f"{order}u2").tobytes()
        return _fp8(flat, self.dtype).tobytes()

    def json(self, x: Numbers) -> msgspec.Raw:
        """Returns a JSON value: nested lists of the array's shape, or base64 of raw()."""
        return base64_json(self.raw(x)) if self.encoding == "base64" else list_json(x)


def list_json(x: Any) -> msgspec.Raw:
    """Returns a numeric array as nested JSON lists."""
    return msgspec.Raw(encode(x.tolist()))


def base64_json(raw: bytes) -> msgspec.Raw:
    return msgspec.Raw(b'"' + base64.b64encode(raw) + b'"')


def native_order() -> str:
    """Returns the byte order of this machine, "little" or "big"."""
    return sys.byteorder


def cohere_json(x: Numbers, kind: str) -> msgspec.Raw:
    """Encodes an embedding [n] as `kind` of COHERE_TYPES: int8 is 127 times the number, uint8 adds 128 to that; binary
    types have one bit per number, 1 if not negative, first number highest. ValueError if n is not a multiple of 8."""
    import numpy as np

    if kind == "float":
        return list_json(x)
    if kind == "base64":
        return base64_json(NumberFormat(dtype="float32", endianness="little").raw(x))
    if kind in ("int8", "uint8"):
        whole = np.clip(np.rint(x * np.float32(_INT8)), -_INT8 - 1, _INT8).astype(np.int16)
        return list_json(whole + (0 if kind == "int8" else 128))
    if len(x) % 8:
        raise ValueError(f"{kind} packs 8 numbers into a byte, and the embedding has {len(x)}; ask for float")
    packed = np.packbits(x >= 0).astype(np.int16)
    return list_json(packed - (128 if kind == "binary" else 0))


def _bfloat16(flat: Numbers) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """Returns the upper 16 bits of float32, rounded to nearest, ties to even; the numbers must be finite."""
    import numpy as np

    bits = flat.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def _fp8(flat: Numbers, dtype: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Rounds to nearest, ties to even; too large numbers become the largest (e4m3) or infinity (e5m2)."""
    import numpy as np

    borders = _borders(dtype)
    size = np.abs(flat.astype(np.float64))
    low, high = np.searchsorted(borders, size, "left"), np.searchsorted(borders, size, "right")
    code = np.where(low % 2 == 0, low, high)  # they differ only on a midpoint: then one of both is even
    return (code.astype(np.uint8) | (np.signbit(flat).astype(np.uint8) << np.uint8(7))).astype(np.uint8)


@functools.cache
def _borders(dtype: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Returns midpoints between neighbouring fp8 values (after the largest: infinity); a value's index is its code.
    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022."""
    import numpy as np

    mantissa, bias, codes = (3, 7, 0x7F) if dtype == "fp8_e4m3" else (2, 15, 0x7D)
    code = np.arange(codes)
    exponent, rest = code >> mantissa, (code & (2**mantissa - 1)) / 2**mantissa
    values = np.where(exponent == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (exponent - bias))
    return np.asarray((values[1:] + values[:-1]) / 2)
