"""Entry points of installed packages, and plug-ins (quintet.general_plugins), which run before a model is loaded."""

import functools
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

logger = logging.getLogger(__name__)

GROUP = "quintet.general_plugins"
STAT_LOGGERS = "quintet.stat_logger_plugins"


def entry_points(group: str) -> Sequence[metadata.EntryPoint]:
    """Returns the entry points of a group, from the packages on sys.path; all are read once: a hundred take 20 ms."""
    return list(_read_entry_points(tuple(sys.path)).select(group=group))


@functools.lru_cache(maxsize=1)
def _read_entry_points(path: tuple[str, ...]) -> Any:  # what it is differs between Python 3.10 and 3.12
    return metadata.entry_points()


@functools.cache
def load_plugins() -> None:
    """Calls each once in a process, by name; they may register models. ValueError names the one that fails."""
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            point.load()()
        except Exception as error:  # a package's own code
            raise ValueError(
                f"the plug-in {point.name!r} ({point.value}) failed: {type(error).__name__}: {error}; mend the package "
                "that brings it, or uninstall it"
            ) from error
        logger.info("plug-in %s (%s) was loaded", point.name, point.value)
