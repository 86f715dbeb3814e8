"""Open files: as many as a server's connections need, or else no more connections than it may have files for."""

import contextlib
import dataclasses
import logging
import resource

from quintet.common.unauthenticated import SPARE_CONNECTIONS
from quintet.server.config import ServerConfig

logger = logging.getLogger(__name__)

# Besides connections: an idle server of one API process has 27, while it loads some more; each further one takes 4.
_BASE_FILES, _FILES_PER_WORKER = 48, 4
_MIN_CONNECTIONS = 16  # connections with which a server is worth its start


def fit_file_limit(settings: ServerConfig) -> ServerConfig:
    """Raises this process's limit, which its children inherit, to what each API process needs.

    Where the system does not let it, max_connections becomes what fits, and the log says so. ValueError: nothing does.
    """
    own = _BASE_FILES + _FILES_PER_WORKER * settings.api_workers + SPARE_CONNECTIONS
    allowed = _raise_limit(own + settings.max_connections)
    if allowed >= own + settings.max_connections:
        return settings
    if allowed < own + _MIN_CONNECTIONS:
        raise ValueError(  # ZeroMQ would abort the process
            f"a process may have {allowed} files open here, and this server wants {own + _MIN_CONNECTIONS} at least; "
            "raise the "
            "limit, as by `ulimit -n 4096`"
        )
    fitting = allowed - own
    logger.warning(
        "max_connections is %d, not %d: a process may open %d files (ulimit -n)",
        fitting,
        settings.max_connections,
        allowed,
    )
    return dataclasses.replace(settings, max_connections=fitting)


def _raise_limit(needed: int) -> int:
    """Returns how many files this process may have open then, or `needed` where nothing limits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):  # a system may have a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
