"""Keys that the ends of a connection prove to know: those of ranks, and of engines that send each other pages."""

import contextlib
import os
import secrets
from pathlib import Path

from quintet.config import KVTransferConfig, read_environment

MIN_RANKS_KEY, MIN_KV_TRANSFER_KEY, MAX_KEY_BYTES = 8, 16, 4096  # bytes of a key


def ranks_key() -> bytes:
    """Returns the key of ranks: one that was given, or one that this user's processes find in a file. ValueError: it is
    too short, or its file is not to be trusted."""
    environment = read_environment()
    if environment.ranks_key is not None:
        return _check_key(environment.ranks_key.encode(), "QUINTET_RANKS_KEY", MIN_RANKS_KEY)
    if environment.ranks_key_file is not None:
        return _read_configured_key(environment.ranks_key_file, "QUINTET_RANKS_KEY_FILE", MIN_RANKS_KEY, private=False)
    return _read_or_make_key(Path(environment.cache_home or "~/.cache").expanduser() / "quintet" / "ranks.key")


def kv_transfer_key(settings: KVTransferConfig) -> bytes:
    """Returns the key that all engines share; empty: none. ValueError where others can read its file, or it is
    short."""
    if settings.extras.key_file is not None:
        return _read_configured_key(
            settings.extras.key_file, "kv_transfer_config: key_file", MIN_KV_TRANSFER_KEY, private=True
        )
    key = (read_environment().kv_transfer_key or "").encode()
    return key and _check_key(key, "QUINTET_KV_TRANSFER_KEY", MIN_KV_TRANSFER_KEY)


def _read_configured_key(path: str, setting: str, least: int, private: bool) -> bytes:
    name = f"{setting}={path!r}"
    try:
        return _read(Path(path).expanduser(), name, least, private)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({error.strerror}); give another") from None


def _read_or_make_key(path: Path) -> bytes:
    """Returns the key in this file, made when it is first wanted, for this user alone; of several processes at once, by
    one."""
    with contextlib.suppress(FileNotFoundError):
        return _read(path, str(path), MIN_RANKS_KEY, True, os.getuid())
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
    return _read(path, str(path), MIN_RANKS_KEY, True, os.getuid())


def _read(path: Path, name: str, least: int, private: bool, owner: int | None = None) -> bytes:
    """Reads a key. private: its owner alone may read the file. owner: user that the file must belong to, if not any."""
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        if (private and state.st_mode & 0o077) or owner not in (None, state.st_uid):
            raise ValueError(f"{name} can be read by others, and is no secret; give a new key, in a file with mode 600")
        return _check_key(file.read(MAX_KEY_BYTES + 1).strip(), name, least)


def _check_key(key: bytes, name: str, least: int) -> bytes:
    if not least <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(
            f"{name} has {len(key)} bytes; a key has from {least} to {MAX_KEY_BYTES} (openssl rand -hex 32)"
        )
    return key
