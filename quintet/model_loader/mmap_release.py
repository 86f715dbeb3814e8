"""Gives a mapped file's pages back once what they hold was copied, so that weights are not in memory twice."""

import ctypes
import functools
import mmap
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """Address ranges of this process that map files which no process writes to; empty on systems without /proc."""

    def __init__(self, files: Collection[Path], maps: Path = _MAPS) -> None:
        wanted = {os.path.realpath(file) for file in files}
        self._ranges = [found for line in _lines(maps) if (found := _private_range(line, wanted))]

    def release_pages(self, tensor: Tensor) -> int:
        """Drops the whole pages under a tensor and returns their bytes: who reads it again gets them from the file.

        Only pages of a private map of one of the files: any other memory would read as zeros from then on.
        """
        first = tensor.data_ptr()
        last = first + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        last = min(last, first + tensor.numel() * tensor.element_size())
        if not tensor.is_contiguous() or not any(start <= first and last <= stop for start, stop in self._ranges):
            return 0
        start, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if start >= stop or _libc().madvise(start, stop - start, mmap.MADV_DONTNEED) != 0:
            return 0  # a refusal costs memory, nothing else
        return stop - start


def _lines(maps: Path) -> list[str]:
    try:
        return maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _private_range(line: str, wanted: Collection[str]) -> tuple[int, int] | None:
    """Range of a line "start-stop rw-p offset device inode      path"; None if no private map of a wanted file."""
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or not fields[1].endswith("p") or fields[5] not in wanted:
        return None
    start, stop = fields[0].split("-")
    return int(start, 16), int(stop, 16)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
