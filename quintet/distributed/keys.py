"""Key that ranks prove to know: one that was given, or one that this user's processes find in a file."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from quintet.config import read_environment

LEAST, MOST = 8, 4096  # bytes of a key


def shared_key() -> bytes:
    """Returns the key. ValueError: it is too short, or its file is not to be trusted."""
    environment = read_environment()
    if environment.ranks_key is not None:
        return _checked(environment.ranks_key.encode(), "QUINTET_RANKS_KEY")
    if environment.ranks_key_file is not None:
        path = Path(environment.ranks_key_file).expanduser()
        try:
            return _checked(path.read_bytes()[: MOST + 1].strip(), f"the file {path} (QUINTET_RANKS_KEY_FILE)")
        except OSError as error:
            raise ValueError(f"QUINTET_RANKS_KEY_FILE: {path} cannot be read ({error.strerror})") from None
    return _own(Path(environment.cache_home or "~/.cache").expanduser() / "quintet" / "ranks.key")


def _own(path: Path) -> bytes:
    """Returns the key in this file, made when it is first wanted, for this user alone; of several processes at once, by
    one."""
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_hex(32).encode())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)  # whole, or not there
    finally:
        os.unlink(beside)
    return _read(path)


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise ValueError(f"{path} can be read by others, and is no secret; remove it, or set QUINTET_RANKS_KEY")
        return _checked(file.read(MOST + 1).strip(), f"the file {path}")


def _checked(key: bytes, what: str) -> bytes:
    if not LEAST <= len(key) <= MOST:
        raise ValueError(f"{what} has {len(key)} bytes; a key has from {LEAST} to {MOST}")
    return key
