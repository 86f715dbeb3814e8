"""A folder for the sockets of one process, which goes with it; a later start removes what a killed one left."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX, _LOCK = "quintet-", "lock"


class PrivateFolder:
    """Only this user may enter it. A file in it is locked while the process lives: the system lets go of it then,
    however the process ends. Children do not hold it."""

    def __init__(self) -> None:
        sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
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


def sweep() -> None:
    """Removes the folders of processes that are surely dead: this user's, with a lock that nobody holds."""
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
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
