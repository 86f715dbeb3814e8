"""Tensors in a segment of shared memory, with a table of their names: one copy for all ranks of a machine.

A segment is a file of this user in /dev/shm, or in the folder for temporary files where there is none.
"""

import math
import mmap
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.engine.weight_transfer.receivers import Expect
from quintet.engine.weight_transfer.tensor_types import dtype_named, name_of_dtype, num_bytes

MAX_SEGMENT = 1 << 28  # bytes of a segment, unless one tensor is larger
PREFIX = "quintet-weights-"
ALIGNMENT = 64  # bytes


def segment_folder() -> Path:
    """Returns the folder of segments."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Segment:
    """A file with tensors. Its owner removes it by close()."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """OSError if there is no room for them."""
        self.path = segment_folder() / f"{PREFIX}{secrets.token_hex(16)}"
        self._table: list[list[Any]] = []
        end = 0
        for name, tensor in tensors:
            self._table.append([name, name_of_dtype(tensor.dtype), list(tensor.shape), end])
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        try:
            self._write(tensors, max(end, 1))
        except BaseException:
            self.close()
            raise

    def _write(self, tensors: Sequence[tuple[str, Tensor]], size: int) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            with mmap.mmap(descriptor, size) as mapped:
                for (_, tensor), (*_, start) in zip(tensors, self._table, strict=True):
                    if tensor.numel():
                        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                        mapped[start : start + len(content)] = content
        finally:
            os.close(descriptor)

    @property
    def info(self) -> dict[str, Any]:
        """Returns what a reader must know, as plain data: update_info of update_weights()."""
        return {"segment": str(self.path), "tensors": self._table}

    def close(self) -> None:
        """Removes the file; readers that have it open keep their pages."""
        self.path.unlink(missing_ok=True)


def segments(tensors: Iterable[tuple[str, Tensor]], most: int = MAX_SEGMENT) -> Iterator[Segment]:
    """Yields segments of `most` bytes, or of one tensor that is larger. Each is to be closed before the next."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        taken = tensor.numel() * tensor.element_size()
        if waiting and size + taken > most:
            yield Segment(waiting)
            waiting, size = [], 0
        # what is yielded may be freed when the next tensor is asked for
        waiting.append((name, tensor.detach().cpu().clone()))
        size += taken
    if waiting:
        yield Segment(waiting)


def read_segment(info: Mapping[str, Any], expect: Expect) -> Iterator[tuple[str, Tensor]]:
    """Yields a segment's tensors, which are gone once the next is asked for. ValueError: it is no file of this user's,
    or its table does not fit it; OSError if it cannot be opened."""
    table = _checked_table(info, expect)
    path = str(info["segment"])
    if not Path(path).name.startswith(PREFIX):
        raise ValueError(f"update_info: segment {path[:200]!r} is none that quintet's Segment wrote")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise ValueError(f"update_info: segment {path[:200]!r} is not a file that this user alone can read")
        ends = [start + num_bytes(shape, dtype) for _, dtype, shape, start in table]
        if max(ends, default=0) > state.st_size:
            raise ValueError(
                f"update_info: segment {path[:200]!r} has {state.st_size} bytes, and its table {max(ends)}"
            )
        mapped = mmap.mmap(descriptor, state.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():  # torch warns of memory that cannot be written to; placing only reads
        warnings.simplefilter("ignore")
        for name, dtype, shape, start in table:
            if math.prod(shape):
                tensor = torch.frombuffer(mapped, dtype=dtype, count=math.prod(shape), offset=start).view(shape)
            else:
                tensor = torch.empty(shape, dtype=dtype)
            yield name, tensor


def _checked_table(info: Mapping[str, Any], expect: Expect) -> list[tuple[str, torch.dtype, list[int], int]]:
    found = []
    for row in info.get("tensors", ()):
        if not isinstance(row, list | tuple) or len(row) != 4 or not isinstance(row[3], int) or row[3] < 0:
            raise ValueError("update_info: each of tensors is [name, dtype, shape, offset in bytes]")
        name, shape, dtype = str(row[0]), [int(each) for each in row[2]], dtype_named(row[1])
        if any(each < 0 for each in shape) or row[3] % dtype.itemsize:
            raise ValueError(f"update_info: {name[:200]} has shape {shape} at byte {row[3]}")
        expect(name, shape, dtype)
        found.append((name, dtype, shape, row[3]))
    return found
