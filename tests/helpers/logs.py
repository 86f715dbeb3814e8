"""The log of a process in which commands are run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_before() -> Iterator[None]:
    """A command sets the log up for the whole process; afterwards it is as it was."""
    log = logging.getLogger("quintet")
    level, handlers = log.level, [*log.handlers]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers
