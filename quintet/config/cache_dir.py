"""The folders in the user's cache where things are kept between starts."""

import os
from pathlib import Path

from quintet.config import read_environment


def cache_folder(name: str) -> Path:
    """Ours of this name, there or not."""
    home = read_environment().cache_home
    return (Path(home) if home else Path.home() / ".cache") / "quintet" / name


def unsafe_reason(folder: Path) -> str | None:
    """Why nothing should be kept in the folder. What lies there is trusted, so only its owner may write there."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to"
    state = there.stat()
    if there == folder and hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & 0o022):
        return f"{folder} can be written to by others, and what lies there is trusted"
    return None
