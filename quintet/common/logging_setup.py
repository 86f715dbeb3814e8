"""The log of the command line, and of a server. A program that uses quintet as a library installs its own, or none."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

LOGGER, UVICORN = "quintet", "uvicorn"
_MCP_LOGGER = "mcp"  # its client logs a traceback for each lost connection; we log one line instead
TRACE = 5  # uvicorn's level below DEBUG


class _TerminalHandler(logging.Handler):
    """One line to standard error: the level where it is worth a word, and the message."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        where = f"{record.name}: " if logging.getLogger(LOGGER).level == logging.DEBUG else ""
        print(f"{level}{where}{self.format(record)}", file=sys.stderr)


def install_terminal_log(level: str) -> None:
    """Shows the package's log from this level on. A second call changes the level alone."""
    log = logging.getLogger(LOGGER)
    log.setLevel(level)
    if not any(isinstance(each, _TerminalHandler) for each in log.handlers):
        log.addHandler(_TerminalHandler())


def install_server_log(settings: Mapping[str, Any]) -> None:
    """Every line with its time and level, ours and uvicorn's alike; `settings` are ServerConfig's fields."""
    form = _JsonFormatter() if settings["log_format"] == "json" else _TimestampFormatter()
    logging.addLevelName(TRACE, "TRACE")
    for name, level in ((LOGGER, settings["log_level"]), (UVICORN, settings["uvicorn_log_level"])):
        log, handler = logging.getLogger(name), logging.StreamHandler(sys.stderr)
        handler.setFormatter(form)
        log.handlers[:] = [handler]
        log.setLevel(level.upper())
    logging.getLogger(_MCP_LOGGER).setLevel(logging.CRITICAL)


def set_log_prefix(who: str) -> None:
    """Prefixes all later log lines of this process with its name."""

    def named(record: logging.LogRecord) -> bool:
        record.msg, record.args = f"{who}: {record.getMessage()}", None
        return True

    for handler in logging.getLogger(LOGGER).handlers:
        handler.addFilter(named)


def _timestamp(record: logging.LogRecord) -> str:
    """ISO 8601 with milliseconds and the zone."""
    local = time.localtime(record.created)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{record.msecs:03.0f}{time.strftime('%z', local)}"


class _TimestampFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000+0000 INFO the message"""

    def format(self, record: logging.LogRecord) -> str:
        where = f"{record.name}: " if logging.getLogger(LOGGER).level == logging.DEBUG else ""
        return f"{_timestamp(record)} {record.levelname:7} {where}{super().format(record)}"


class _JsonFormatter(logging.Formatter):
    """One object a line; a trace is part of the message."""

    def format(self, record: logging.LogRecord) -> str:
        record_fields = {"time": _timestamp(record), "level": record.levelname, "logger": record.name}
        return json.dumps({**record_fields, "message": super().format(record)}, ensure_ascii=False)
