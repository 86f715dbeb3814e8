"""The log handler of the command line. A program that uses quintet as a library installs its own, or none."""

import logging
import sys

LOGGER = "quintet"


class _Concise(logging.Handler):
    """One line to standard error: the level where it is worth a word, and the message."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        where = f"{record.name}: " if logging.getLogger(LOGGER).level == logging.DEBUG else ""
        print(f"{level}{where}{self.format(record)}", file=sys.stderr)


def install(level: str) -> None:
    """Shows the package's log from this level on. A second call changes the level alone."""
    log = logging.getLogger(LOGGER)
    log.setLevel(level)
    if not any(isinstance(each, _Concise) for each in log.handlers):
        log.addHandler(_Concise())
