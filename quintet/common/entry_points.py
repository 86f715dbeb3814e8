"""Entry points of installed packages. All packages are read once: reading a hundred takes 20 ms."""

import functools
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def entry_points(group: str) -> Sequence[metadata.EntryPoint]:
    """Returns the entry points of a group, from the packages on sys.path."""
    return list(_read_entry_points(tuple(sys.path)).select(group=group))


@functools.lru_cache(maxsize=1)
def _read_entry_points(path: tuple[str, ...]) -> Any:  # what it is differs between Python 3.10 and 3.12
    return metadata.entry_points()
