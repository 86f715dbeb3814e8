"""Memory of native kernels' results: torch's, or an arena's while a step is recorded.

A recorded step is run again on the same addresses. The arena keeps them: memory of a freed tensor is
used for another, as torch would do, but the memory itself stays as long as the arena.
"""

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
SEGMENT = 4 << 20  # bytes that are asked for at least
HUGE = 2 << 20  # bytes of a huge page


class Arena:
    """Memory that is lent out in pieces, first fit, and taken back when the last tensor on a piece is gone."""

    def __init__(self) -> None:
        self._segments: list[np.ndarray[Any, Any]] = []
        self._free: list[tuple[int, int, int]] = []  # (segment, start, stop), in order; neighbours are joined
        # Not yet among them: the collector may find at any moment, in _take() too, that a tensor is gone.
        self._back: deque[tuple[int, int, int]] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self._segments)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that holds anything; its memory returns when nothing refers to it any more."""
        wanted = math.prod(shape) * dtype.itemsize
        size = max(1, -(-wanted // ALIGNMENT)) * ALIGNMENT
        segment, start = self._take(size)
        piece = self._segments[segment][start : start + wanted]
        weakref.finalize(piece, self._back.append, (segment, start, start + size)).atexit = False
        return torch.from_numpy(piece).view(dtype).view(*shape)

    def view(self, x: Tensor) -> Tensor:
        """Returns a view that does not keep the arena from reusing x's memory; x itself if it is outside the arena."""
        for segment in self._segments:
            offset = x.data_ptr() - segment.ctypes.data
            if 0 <= offset < segment.nbytes:
                whole = torch.from_numpy(segment).view(x.dtype)
                return whole.as_strided(x.shape, x.stride(), offset // x.element_size())
        return x

    def _take(self, size: int) -> tuple[int, int]:
        while self._back:
            self._join(self._back.popleft())
        for i, (segment, start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[i : i + 1] = [(segment, start + size, stop)] if stop - start > size else []
                return segment, start
        memory = np.empty(max(size, SEGMENT) + ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % ALIGNMENT
        self._segments.append(memory[first : first + max(size, SEGMENT)])
        self._free.append((len(self._segments) - 1, 0, max(size, SEGMENT)))
        return self._take(size)

    def _join(self, back: tuple[int, int, int]) -> None:
        joined: list[tuple[int, int, int]] = []
        for piece in sorted([*self._free, back]):
            if joined and joined[-1][0] == piece[0] and joined[-1][2] == piece[1]:
                joined[-1] = (piece[0], joined[-1][1], piece[2])
            else:
                joined.append(piece)
        self._free = joined


_of_thread = threading.local()


@contextmanager
def use_arena(arena: Arena) -> Iterator[None]:
    """Within, empty() takes from the arena, in this thread."""
    _of_thread.arena = arena
    try:
        yield
    finally:
        _of_thread.arena = None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns memory for a native kernel's result: [*shape], contiguous, uninitialized."""
    arena: Arena | None = getattr(_of_thread, "arena", None)
    return torch.empty(*shape, dtype=dtype) if arena is None else arena.empty(shape, dtype)


@contextmanager
def use_small_pages(wanted: bool = True) -> Iterator[None]:
    """Within, weights of this thread lie in small pages, if `wanted`: a map of a file takes their place in seconds. Of
    memory that is full of cached files the system makes huge pages at 0.5 GB/s, and finds small ones at 1.5."""
    before = getattr(_of_thread, "small_pages", False)
    _of_thread.small_pages = wanted
    try:
        yield
    finally:
        _of_thread.small_pages = before


def empty_weight(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for a weight. A large one is in huge pages if available, and begins with one."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE:
        return torch.empty(*shape, dtype=dtype)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has small pages
    if not getattr(_of_thread, "small_pages", False):
        with suppress(OSError):  # refused: it works without
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return whole[first : first + size].view(dtype).view(*shape)
