"""Digests of files and of Python sources, without reading large files whole."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

HEAD = 2**20  # bytes from a file's beginning
NUM_SAMPLES, SAMPLE = 64, 4096  # blocks that are spread evenly over the rest, and bytes of each


def file_identity(file: Path) -> bytes:
    """Returns a digest of a file's real path, size, times, inode and samples of its content.

    Size and modification time are not enough: images set all times alike, and `cp -p` keeps them.
    """
    identity = hashlib.sha256()
    with file.open("rb") as stream:
        state = os.fstat(stream.fileno())
        times = f"{state.st_mtime_ns} {state.st_ctime_ns} {state.st_ino}"
        identity.update(f"{file.resolve()} {state.st_size} {times}".encode(errors="surrogateescape"))
        identity.update(stream.read(HEAD))
        room = max(0, state.st_size - HEAD - SAMPLE)
        for number in range(NUM_SAMPLES if state.st_size > HEAD else 0):
            stream.seek(HEAD + room * number // (NUM_SAMPLES - 1))
            identity.update(stream.read(SAMPLE))
    return identity.digest()


def sources_digest(places: Iterable[Path]) -> str:
    """Returns a digest of the Python sources in files and folders."""
    sources = hashlib.sha256()
    for place in places:
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            sources.update(hashlib.sha256(file.read_bytes()).digest())
    return sources.hexdigest()
