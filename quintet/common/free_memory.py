"""Gives memory back to the system once a process has started: free heap, and pages of files that the start read."""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAPS = Path("/proc/self/smaps")
_MIN_BYTES = 2**18  # of pages in memory: a smaller map is not worth a call


def release_free_memory() -> None:
    """Gives free memory of the C library's heap back: building a tokenizer leaves up to 300 MB there."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


def release_file_pages(maps: Path = _MAPS) -> int:
    """Drops the pages of mapped files from this process, and returns their bytes. They stay in the system's cache of
    files, and those that are used again come from there: `import torch` reads 60 MiB of libraries to register operators
    and to relocate, of which serving needs a tenth, and a GGUF file's vocabulary takes 5.

    Only pages that equal the file's: a map with a changed page (a relocated table, a debugger's break) is left as it
    is, and so is one that can be written to.
    """
    if sys.platform != "linux":
        return 0
    try:
        with maps.open(errors="surrogateescape") as lines:
            found = list(_unchanged(lines))
    except OSError:
        return 0
    libc, released = ctypes.CDLL(None), 0
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, stop, resident in found:
        if libc.madvise(start, stop - start, mmap.MADV_DONTNEED) == 0:
            released += resident
    return released


def _unchanged(lines: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """Yields start, stop and resident bytes of those maps of which no page was changed."""
    place: str | None = None
    values: dict[str, int] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):  # the head of a map: "start-stop r-xp offset device inode      path"
            if place is not None:
                yield from _if_unchanged(place, values)
            fields = line.split(maxsplit=5)
            place, values = (name if len(fields) == 6 and _is_released(fields[1], fields[5]) else None), {}
        elif place is not None:
            with contextlib.suppress(ValueError, IndexError):  # the line of flags has no number
                values[name] = int(rest.split()[0]) * 1024
    if place is not None:
        yield from _if_unchanged(place, values)


def _is_released(rights: str, path: str) -> bool:
    """Returns whether a map is of a library, or of a GGUF file's header: weights are mapped with rights to write."""
    if path.rstrip().endswith(".gguf"):
        return rights == "r--s"
    return ".so" in path.rpartition("/")[2] and rights in ("r-xp", "r--p")


def _if_unchanged(place: str, values: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    start, stop = (int(each, 16) for each in place.split("-"))
    changed = values.get("Anonymous:", 1) + values.get("Private_Dirty:", 1) + values.get("Swap:", 0)
    if not changed and values.get("Rss:", 0) >= _MIN_BYTES:
        yield start, stop, values["Rss:"]
