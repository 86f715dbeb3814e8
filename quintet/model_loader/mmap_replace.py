"""Replaces memory that holds the same bytes as a file by a map of that file, at the same addresses.

The system can then drop the pages when memory is short, and processes that map the file share them. Steps may read the
memory meanwhile: a thread sees the old pages or the new ones, which are equal. No thread may write to it.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

MIN_BYTES = 2**21  # of a tensor: smaller ones would cost a map each, and their number is limited
_FAILED = ctypes.c_void_p(-1).value
_MAY_MOVE, _FIXED = 1, 2  # mremap's flags


def replace_by_file(descriptor: int, places: Iterable[tuple[int, Tensor]]) -> int:
    """Returns the bytes that were replaced: the whole pages of tensors that begin at a page's start, in memory and in
    the file. `descriptor`: of a file that is open for reading; `places`: offsets of the tensors in it."""
    if sys.platform != "linux":
        return 0
    return sum(_replace(descriptor, offset, tensor) for offset, tensor in places)


def _replace(descriptor: int, offset: int, tensor: Tensor) -> int:
    start, size = tensor.data_ptr(), tensor.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    if size < MIN_BYTES or start % mmap.PAGESIZE or offset % mmap.PAGESIZE or not tensor.is_contiguous():
        return 0
    libc, protection = _libc(), mmap.PROT_READ | mmap.PROT_WRITE  # private: an update of the weights copies its pages
    found = libc.mmap(None, size, protection, mmap.MAP_PRIVATE, descriptor, offset)
    if found == _FAILED:
        return 0  # it costs memory, nothing else
    if libc.mremap(found, size, size, _MAY_MOVE | _FIXED, start) == _FAILED:
        libc.munmap(found, size)
        return 0
    return size


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (pointer, size, number, number, number, ctypes.c_int64), pointer
    libc.mremap.argtypes, libc.mremap.restype = (pointer, size, size, number, pointer), pointer
    libc.munmap.argtypes = (pointer, size)
    return libc
