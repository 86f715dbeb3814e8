"""A folder for the sockets of one process, which goes with it; a later start removes what a killed one left."""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX, _LOCK = "quintet-", "lock"
_NAME = len("quintet-12345678/engine1234567")  # characters of the longest path below the folder for temporary files
_MOST = (107 if sys.platform == "linux" else 103) - 1 - _NAME  # bytes of that: a socket's path has room for no more
_SHORT = "/tmp"


class PrivateFolder:
    """Only this user may enter it. A file in it is locked while the process lives: the system lets go of it then,
    however the process ends. Children do not hold it."""

    def __init__(self) -> None:
        """Raises ValueError if no folder has a path that is short enough."""
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_parent()))
        made = self.path / "new"  # locked before it has the name that sweepers look for
        self._held = made.open("wb")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        made.rename(self.path / _LOCK)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _parent() -> str:
    """The folder for temporary files, if a socket's path may begin with it."""
    asked = tempfile.gettempdir()
    length = len(os.fsencode(asked))
    if length <= _MOST:
        return asked
    if not os.access(_SHORT, os.W_OK | os.X_OK):
        raise ValueError(
            f"the folder for temporary files, {asked}, has a path of {length} bytes, and sockets in it have room for "
            f"{_MOST}; set TMPDIR to a shorter one ({_SHORT} cannot be written)"
        )
    logger.info(
        "the path of TMPDIR, %d bytes, leaves sockets no room (%d at most): they lie in %s", length, _MOST, _SHORT
    )
    return _SHORT


def sweep() -> None:
    """Removes the folders of processes that are surely dead: this user's, with a lock that no process holds."""
    for parent in {tempfile.gettempdir(), _SHORT}:
        _sweep(Path(parent))


def _sweep(parent: Path) -> None:
    for each in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), open(each / _LOCK, "r+b", opener=_no_link) as lock:
            if _is_ours(each, lock.fileno()):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while it is held
                shutil.rmtree(each, ignore_errors=True)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_ours(folder: Path, lock: int) -> bool:
    found, held = folder.lstat(), os.fstat(lock)
    kinds = stat.S_ISDIR(found.st_mode) and stat.S_ISREG(held.st_mode)
    return kinds and found.st_uid == held.st_uid == os.getuid()
