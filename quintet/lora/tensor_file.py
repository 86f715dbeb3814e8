"""A safetensors file, read once from its beginning to its end: the bytes that are hashed are those that are kept.

The file is not mapped: one that is cut short while it is read gives an error, not SIGBUS. The header is checked as the
format asks (https://huggingface.co/docs/safetensors): offsets without holes or overlaps, up to the end of the file.
"""

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.lora.errors import AdapterError, shown

MAX_HEADER = 32 * 2**20  # bytes: 100,000 tensors of 300 bytes each
MAX_NAME, MAX_DIMS, MAX_SIZE = 512, 8, 2**48
CHUNK = 2**20  # bytes that are read at a time
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_AGAIN = "fetch or save the file again"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file, by its header."""

    name: str
    dtype: str  # as safetensors calls it, one of FLOATS
    shape: tuple[int, ...]
    begin: int  # bytes from the end of the header
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class HashedTensor:
    entry: TensorEntry
    digest: bytes  # SHA-256 of its bytes
    tensor: Tensor | None  # None where it is not kept


def read_tensors(file: Path, max_bytes: int, max_tensors: int, keep: bool) -> Iterator[HashedTensor]:
    """Yields the file's tensors in the order of their bytes. AdapterError names a tensor that is wrong, or the limit
    that the file exceeds, before any tensor is read."""
    try:
        with _open(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            entries = read_header(file, stream, size, max_tensors)
            if (total := sum(entry.num_bytes for entry in entries)) > max_bytes:
                raise AdapterError(file, f"its tensors have {total} bytes, more than the {max_bytes} that are allowed")
            scratch = bytearray(CHUNK)
            for entry in entries:
                yield _read(file, stream, entry, scratch, keep)
    except OSError as error:
        raise AdapterError(file, f"cannot be read ({error.strerror or error}); {_AGAIN}") from None


def read_header(file: Path, stream: BufferedReader, size: int, max_tensors: int) -> list[TensorEntry]:
    """Reads the header of a file of `size` bytes; the entries are in the order of their bytes."""
    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > size - 8:
        raise AdapterError(file, f"is cut short, or no safetensors file: {size} bytes, a header of {length}; {_AGAIN}")
    if length > MAX_HEADER:
        raise AdapterError(file, f"has a header of {length} bytes, more than the {MAX_HEADER} of any adapter; {_AGAIN}")
    header = _parse(file, stream.read(length))
    header.pop("__metadata__", None)
    if len(header) > max_tensors:
        raise AdapterError(file, f"holds {len(header)} tensors, more than the {max_tensors} that are allowed")
    entries = sorted((_entry(file, name, value) for name, value in header.items()), key=lambda e: (e.begin, e.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise AdapterError(
                file, f"tensor {shown(entry.name)} begins at byte {entry.begin}, where byte {end} is next; {_AGAIN}"
            )
        end = entry.end
    if end != size - 8 - length:
        raise AdapterError(file, f"has {size - 8 - length} bytes of tensors, and its header names {end}; {_AGAIN}")
    return entries


def _open(file: Path) -> BufferedReader:
    """Opens a regular file; a pipe or device would block."""
    stream = os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise AdapterError(file, f"is no regular file; {_AGAIN}")
    return stream


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise AdapterError(file, f"its header names {shown(twice)} twice; {_AGAIN}")
        return content

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except AdapterError:
        raise
    except (ValueError, RecursionError) as error:
        raise AdapterError(file, f"its header is not JSON ({str(error)[:100]}); {_AGAIN}") from None
    if not isinstance(header, dict):
        raise AdapterError(file, f"its header is a {type(header).__name__}, not an object; {_AGAIN}")
    return header


def _entry(file: Path, name: str, value: Any) -> TensorEntry:
    def wrong(what: str) -> AdapterError:
        return AdapterError(file, f"tensor {shown(name)} {what}; {_AGAIN}")

    if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise wrong(f"has a name of {len(name)} characters, some of which cannot be printed, or too many")
    if not isinstance(value, dict) or {"dtype", "shape", "data_offsets"} - set(value):
        raise wrong("has no dtype, shape or data_offsets in the header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in FLOATS:
        raise AdapterError(
            file,
            f"tensor {shown(name)} has dtype {shown(dtype)}, not one of {', '.join(FLOATS)}; save it in one of these",
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise wrong(f"has the shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has the data_offsets {shown(offsets)}")
    needed = math.prod(shape) * FLOATS[dtype].itemsize
    if needed != offsets[1] - offsets[0]:
        raise wrong(f"of {dtype} and shape {shape} needs {needed} bytes, and has {offsets[1] - offsets[0]}")
    return TensorEntry(name, dtype, tuple(shape), *offsets)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= MAX_SIZE for each in value)


def _read(file: Path, stream: BufferedReader, entry: TensorEntry, scratch: bytearray, keep: bool) -> HashedTensor:
    digest = hashlib.sha256()  # processors have instructions for it
    kept = torch.empty(entry.num_bytes, dtype=torch.uint8) if keep else None
    whole = memoryview(scratch) if kept is None else memoryview(kept.numpy().data)
    for begin in range(0, entry.num_bytes, CHUNK):
        count = min(CHUNK, entry.num_bytes - begin)
        part = whole[:count] if kept is None else whole[begin : begin + count]
        if stream.readinto(part) != count:
            raise AdapterError(file, f"tensor {shown(entry.name)} is cut short; {_AGAIN}")
        digest.update(part)
    tensor = None if kept is None else kept.view(FLOATS[entry.dtype]).reshape(entry.shape)
    return HashedTensor(entry, digest.digest(), tensor)
