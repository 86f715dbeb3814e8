"""Runs plugins of installed packages (entry-point group quintet.general_plugins) before a model is looked for."""

import functools
import logging

from quintet.common.entry_points import entry_points

logger = logging.getLogger(__name__)

GROUP = "quintet.general_plugins"


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
