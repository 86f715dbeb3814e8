"""Cache of transformers' reading of a model's files, as JSON: importing transformers costs seconds at each start.

A reading is found by the digest of what was read. Those of the bundled models come with the package; the others lie in
the user's cache, under the versions of the libraries that made them.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from quintet.config.cache_dir import cache_folder, unsafe_reason

try:
    import fcntl
except ImportError:  # no POSIX: two processes may make the same reading
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

Read = TypeVar("Read")

SUFFIX = ".reading"
FORMAT = 1  # of all readings: raised with any change of what is in one
SHIPPED = Path(__file__).with_name("transformers_cache.json")  # written by scripts/shipped_readings.py
MAX_BYTES = 2**26  # bytes of one reading: the largest tokenizers take 40 MB
MAX_IN_ALL = 2**28  # bytes; those that were not used for longest go first
MAX_FILES = 512
LOCK = ".lock"  # of files that a process has locked while it makes a reading: one of 256, by the reading's name
LOCK_SECONDS, LOCK_POLL = 30.0, 0.01  # seconds of a wait for it, and between two looks
LOCK_QUIET = 1.0  # seconds of a wait before the log has a line
UNFINISHED = "unfinished-"  # begins the name of a file that is being written
UNFINISHED_SECONDS = 3600.0  # its age when its process must have ended


def digest(kind: str, parts: Iterable[bytes]) -> str:
    """The name of the reading of these parts."""
    named = hashlib.sha256(f"{FORMAT} {kind}".encode())
    for part in parts:
        named.update(hashlib.sha256(part).digest())
    return named.hexdigest()


def is_worth_making(name: str) -> bool:
    """Returns whether there is no reading of this name, and one could be kept."""
    folder = cache_folder("readings")
    if _why_unusable(folder) or (folder / _file(name)).is_file():
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@contextlib.contextmanager
def making(name: str) -> Iterator[None]:
    """Within, no other process makes the reading of this name: it waits for LOCK_SECONDS at most, and finds it made."""
    folder = cache_folder("readings")
    with contextlib.ExitStack() as stack:
        if fcntl is not None and not _why_unusable(folder):
            with contextlib.suppress(OSError):  # a folder or a file system that has no lock
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _wait_for_lock(stack.enter_context((folder / (name[:2] + LOCK)).open("ab")))
        yield


def _wait_for_lock(stream: BinaryIO) -> None:
    begun, silent = time.monotonic(), True
    while (waited := time.monotonic() - begun) < LOCK_SECONDS:
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if silent and waited > LOCK_QUIET:
                logger.info("waiting up to %g s for the process that reads this tokenizer", LOCK_SECONDS)
                silent = False
            time.sleep(LOCK_POLL)


def find(name: str, thaw: Callable[[Any], Read]) -> Read | None:
    """Returns `thaw` of the cached reading. None if it is missing or damaged: it is then made and kept anew."""
    shipped, folder = _load(SHIPPED) or {}, cache_folder("readings")
    if name in shipped:
        return thaw(shipped[name])
    file = folder / _file(name)
    if _why_unusable(folder) or (found := _load(file)) is None:
        return None
    try:
        read = thaw(found[name])
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        logger.info("%s is damaged (%r); it is made anew", file, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(file)  # used: the last to go
    return read


def store(name: str, reading: Any) -> None:
    """Stores a reading for later starts. If that fails, each start pays for the import; the reason is logged once."""
    folder = cache_folder("readings")
    content = json.dumps({name: reading}, ensure_ascii=False).encode(errors="surrogatepass")
    why = (
        f"a reading takes {len(content)} bytes, over {MAX_BYTES}" if len(content) > MAX_BYTES else _why_unusable(folder)
    )
    if why is None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(folder / _file(name), content)
            with contextlib.suppress(FileNotFoundError):  # another process took it away first
                _prune(folder)
        except OSError as error:
            why = f"{folder} cannot be written to ({error.strerror})"
    if why is not None:
        _warn(f"{why}; each start with this model imports transformers, which takes seconds")


@functools.cache
def _warn(what: str) -> None:
    logger.info("%s", what)


@functools.cache
def _versions() -> tuple[str, str]:
    return version("transformers"), version("tokenizers")


def _file(name: str) -> str:
    return hashlib.sha256(" ".join((name, *_versions())).encode()).hexdigest() + SUFFIX


def _why_unusable(folder: Path) -> str | None:
    """Returns why the folder must not be used; None if it may be."""
    if "dev" in _versions()[0]:
        return f"transformers {_versions()[0]} is in development: what it makes changes under one version"
    return unsafe_reason(folder)


def _load(file: Path) -> Any:
    """Returns the file's JSON object; None if the file is missing or too large, or holds no object."""
    try:
        content = file.read_bytes() if file.stat().st_size <= MAX_BYTES else b"null"
        loaded = json.loads(content.decode(errors="surrogatepass"))
    except (OSError, ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _write(file: Path, content: bytes) -> None:
    """Writes the file atomically: another process may read it meanwhile."""
    handle, made = tempfile.mkstemp(prefix=UNFINISHED, dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(made, file)
    except OSError:
        Path(made).unlink(missing_ok=True)
        raise


def _prune(folder: Path) -> None:
    for each in folder.glob(f"{UNFINISHED}*"):  # of processes that were killed
        if time.time() - each.stat().st_mtime > UNFINISHED_SECONDS:
            each.unlink(missing_ok=True)
    states = sorted(((each.stat(), each) for each in folder.glob(f"*{SUFFIX}")), key=lambda each: -each[0].st_mtime)
    total = 0
    for index, (state, each) in enumerate(states):
        total += state.st_size
        if index >= MAX_FILES or total > MAX_IN_ALL:
            each.unlink(missing_ok=True)
