"""Bounded folder of pages, one file each; it outlives the engine.

A file is complete or absent: it is written beside its place and then renamed. A file that a crash has left incomplete
is detected by its size or its checksum, and is no page. The folder is its owner's alone, and one engine's at a time.
"""

import contextlib
import logging
import os
import queue
import re
import struct
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quintet.config.cache_dir import unsafe_reason
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.offload.eviction import POLICIES

try:
    import fcntl
except ImportError:  # no POSIX: two engines that share a folder are not detected
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

MAGIC = b"quintet: a page\0"
VERSION = 1  # raised with any change of a file's content
HEADER = struct.Struct("<16sI64sQI4x")  # magic, version, key, bytes that follow, their CRC-32
SUFFIX = ".page"
LOCK = "lock"
RANK_FOLDER = re.compile(r"rank-([0-9]{1,4})")  # the folder of one rank, where ranks are processes
NUM_READERS = 2  # threads: checksums take a core each
MAX_QUEUED_BYTES = 2**28  # bytes that wait to be written; pages that come while there are more are not written
CLOSE_SECONDS = 10.0  # seconds that close() waits for the writer


class ForeignFolder(NamedTuple):
    """Page file of another size, which is another model's, or of another number of ranks."""

    path: Path
    nbytes: int


class DiskTier:
    """Page files by key. Threads read and write them, so that callers do not wait."""

    def __init__(self, folder: Path, nbytes: int, words: int, order: str, others: Sequence[Path] = ()) -> None:
        """others: folders in which a run with another number of ranks left pages: they count towards the limit, and go
        first. ValueError says why the folder cannot be used."""
        self._folder, self._limit, self._nbytes, self.words = folder, nbytes, HEADER.size + 4 * words, words
        self._order = POLICIES[order](nbytes // self._nbytes)
        self._foreign: deque[ForeignFolder] = deque()  # the oldest first
        self._lock = threading.Lock()  # guards the order, and what follows
        self._queued, self._queued_bytes, self._broken = set[bytes](), 0, False
        self._held = [_lock_folder(folder)]
        self._find(self._taken_over(others))
        self._writes: queue.SimpleQueue[tuple[bytes, PageRows] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[tuple[bytes, Callable[[PageRows | str], None]] | None] = queue.SimpleQueue()
        loops = [self._write_all, *[self._read_all] * NUM_READERS]
        self._threads = [threading.Thread(target=loop, name="quintet-pages", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._order

    @property
    def capacity(self) -> int:
        return self._order.capacity

    def write(self, key: bytes, row: PageRows) -> None:
        """Queues a page to be written. The caller must not change the row any more."""
        with self._lock:
            if key in self._order or key in self._queued or self._queued_bytes >= MAX_QUEUED_BYTES:
                return
            self._queued.add(key)
            self._queued_bytes += self._nbytes
        self._writes.put((key, row))

    def read(self, key: bytes, then: Callable[[PageRows | str], None]) -> None:
        """Calls `then` from another thread, with the row, or with why there is none; in that case the file is
        removed."""
        self._reads.put((key, then))

    def close(self) -> None:
        """Ends the threads; queued pages are written first, if that takes moments."""
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        while self._held:
            os.close(self._held.pop())

    # ------------------------------------------------------------------------------------------------------ in threads

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            key, row = job
            try:
                self._write(key, row)
                self._broken = False
            except OSError as error:
                if not self._broken:  # once, until it goes well again
                    logger.warning("%s keeps no pages: %s; they are computed again", self._folder, error)
                self._broken = True
            finally:
                with self._lock:
                    self._queued.discard(key)
                    self._queued_bytes -= self._nbytes

    def _write(self, key: bytes, row: PageRows) -> None:
        victims = []
        with self._lock:
            while len(self._order) >= self._order.capacity:
                victim = self._order.evict(lambda _: False, key)
                if victim is None:
                    return  # there is no room for a single page
                victims.append(victim)
        for victim in victims:
            self._path(victim).unlink(missing_ok=True)
        self._trim(self._nbytes)
        content = np.ascontiguousarray(row).data.cast("B") if self.words else b""
        place = self._path(key)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        handle, made = tempfile.mkstemp(".part", dir=place.parent)  # of mode 0600
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(HEADER.pack(MAGIC, VERSION, key, len(content), zlib.crc32(content)))
                stream.write(content)
            os.replace(made, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise
        with self._lock:
            self._order.add(key, lambda _: False)

    def _trim(self, more: int) -> None:
        """Removes pages of other models, until there is room for so many bytes."""
        used = len(self._order) * self._nbytes + sum(each.nbytes for each in self._foreign)
        while self._foreign and used + more > self._limit:
            other = self._foreign.popleft()
            used -= other.nbytes
            other.path.unlink(missing_ok=True)

    def _read_all(self) -> None:
        while (job := self._reads.get()) is not None:
            key, then = job
            try:
                row: PageRows | str = self._read(key)
                with self._lock:
                    if key in self._order:
                        self._order.touch(key)
            except (OSError, ValueError) as error:
                row = f"{self._path(key)}: {error}"
                with self._lock:
                    self._order.remove(key)
                with contextlib.suppress(OSError):
                    self._path(key).unlink()
            then(row)

    def _read(self, key: bytes) -> PageRows:
        """Returns the page; OSError or ValueError where the file is missing, or not complete."""
        row = np.empty(self.words, np.int32)
        with open(os.open(self._path(key), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb", buffering=0) as stream:
            header = stream.read(HEADER.size)
            if len(header) < HEADER.size:
                raise ValueError("it is cut short")
            magic, version, named, nbytes, checksum = HEADER.unpack(header)
            if magic != MAGIC or version != VERSION:
                raise ValueError("it is no page of this version")
            if named != key.ljust(len(named), b"\0") or nbytes != row.nbytes:
                raise ValueError("it is another page")
            into, got = row.data.cast("B") if self.words else memoryview(b""), 0
            while got < nbytes and (count := stream.readinto(into[got:])):
                got += count
            if got != nbytes or zlib.crc32(into) != checksum:
                raise ValueError("it is damaged")
            with contextlib.suppress(OSError):
                os.utime(stream.fileno())  # the order of use, for the next start
        return row

    # ---------------------------------------------------------------------------------------------------- at the start

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[-2:] / (name + SUFFIX)

    def _taken_over(self, others: Sequence[Path]) -> list[Path]:
        """Locks the folders -> those that were free; another rank may hold one, or another engine."""
        found = []
        for each in others:
            try:
                self._held.append(_lock_folder(each))
                found.append(each)
            except ValueError as error:
                logger.info("what lies there is not counted: %s", error)
        return found

    def _find(self, others: Sequence[Path]) -> None:
        """Finds pages of earlier runs, the oldest first; removes unfinished files, and pages beyond the limit."""
        found = [(*each, folder) for folder in (self._folder, *others) for each in _page_files(folder)]
        for path, state, folder in sorted(found, key=lambda each: each[1].st_mtime_ns):
            key = _key_of(path)
            if key is None:
                path.unlink(missing_ok=True)
            elif folder is not self._folder or state.st_size != self._nbytes:
                self._foreign.append(ForeignFolder(path, state.st_size))
            else:
                _, gone = self._order.add(key, lambda _: False)
                for each in gone:
                    self._path(each).unlink(missing_ok=True)
                if key not in self._order:
                    path.unlink(missing_ok=True)
        self._trim(0)


def other_folders(folder: Path, ranks: int) -> list[Path]:
    """Returns the folders with pages there that an engine with so many rank processes does not use (0: it has none)."""
    try:
        named = [(RANK_FOLDER.fullmatch(each.name), Path(each.path)) for each in os.scandir(folder) if _is_folder(each)]
    except OSError:  # it is missing; or it cannot be used, and _lock_folder() says why
        return []
    found = [path for match, path in named if match and int(match[1]) >= ranks]
    return sorted(found) + ([folder] if ranks and (folder / LOCK).exists() else [])


def _is_folder(each: "os.DirEntry[str]") -> bool:
    return each.is_dir(follow_symlinks=False)


def make_shared_folder(folder: Path) -> Path:
    """Returns the folder of the ranks' folders, made if it is missing; ValueError says why it cannot be used."""
    try:
        _make_folder(folder)
    except OSError as error:
        raise ValueError(f"kv_offloading_folder: {folder} cannot be used ({error.strerror}); give another") from None
    return folder


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := unsafe_reason(folder):
        raise ValueError(f"kv_offloading_folder: {why}; give a folder of your own (chmod 700)")


def _lock_folder(folder: Path) -> int:
    """Locks the folder for this engine -> the handle that holds the lock; ValueError says why it cannot."""
    try:
        _make_folder(folder)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise ValueError(f"kv_offloading_folder: {folder} cannot be used ({error.strerror}); give another") from None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ValueError(
            f"kv_offloading_folder: {folder} is another engine's while that runs; give each engine its own"
        ) from None
    return handle


def _page_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields the files in the folder's own subfolders; links are skipped, for they are not ours."""
    for each in os.scandir(folder):
        if not _is_folder(each) or len(each.name) != 2:
            continue
        for found in os.scandir(each.path):
            if found.is_file(follow_symlinks=False):
                yield Path(found.path), found.stat(follow_symlinks=False)


def _key_of(path: Path) -> bytes | None:
    """Returns the key of a page file; None if the file is no page."""
    try:
        return bytes.fromhex(path.stem) if path.suffix == SUFFIX else None
    except ValueError:
        return None
