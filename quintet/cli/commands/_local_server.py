"""A server of our own for the length of one command: private, and gone with it."""

import argparse
import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.cli.commands import _engine as engine
from quintet.clients.errors import ServerError
from quintet.clients.remote_engine import connect
from quintet.clients.server_address import ServerTarget
from quintet.common.processes import end, ending_with_parent
from quintet.common.socket_folder import PrivateFolder
from quintet.common.subprocess_python import python_command
from quintet.config import EngineConfig
from quintet.config.schema.typed_flags import as_typed

SERVE = (*python_command("quintet.cli.main"), "serve")
START_SECONDS = 3600.0  # a large model may have to be downloaded first
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.05  # between two looks at /ready
_LOG_TAIL_LINES = 40  # lines of the log that are shown when it fails


@contextlib.contextmanager
def local_server(arguments: argparse.Namespace) -> Iterator[ServerTarget]:
    """`quintet serve` with the engine flags of this command, on a socket that no other user can open.

    ValueError with the server's last words where it does not become ready.
    """
    with PrivateFolder() as folder:
        server = ServerTarget(uds=f"{folder}/socket", api_key=secrets.token_hex())
        command = [*SERVE, "--uds", f"{folder}/socket", "--api-key", str(server.api_key), *_flag_words(arguments)]
        log = folder / "log"
        # A session of its own: Ctrl-C is for this command, which then ends the server.
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=ending_with_parent(os.getpid(), signal.SIGTERM),
            ) as process,
        ):
            try:
                _wait(server, process, log)
                yield server
                if process.poll() is not None:  # what is left unanswered has its reason here
                    engine.print_stderr(f"the server ended with code {process.returncode}; its log:\n{_log_tail(log)}")
            finally:
                end(process, _STOP_SECONDS)


def _flag_words(arguments: argparse.Namespace) -> list[str]:
    """The engine flags that were given, once more as words."""
    words, typed = [], getattr(arguments, "typed", {})
    for name, value in engine.engine_settings(arguments).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flag = as_typed(typed, f"{EngineConfig.__name__}.{name}", flag)  # the server's refusals are to name it
            words += [f"{flag}={_word(each)}" for each in (value if isinstance(value, list | tuple) else [value])]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _wait(server: ServerTarget, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while not _is_ready(server):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_SECONDS)
            raise ValueError(
                _user_error(log) or f"the server ended with code {code} before it was ready; its log:\n{_log_tail(log)}"
            )
        if time.monotonic() > end:
            raise ValueError(f"the server was not ready after {START_SECONDS:g} s; its log:\n{_log_tail(log)}")


def _is_ready(server: ServerTarget) -> bool:
    try:
        with contextlib.closing(connect(server, 5.0)) as connection:
            connection.request("GET", "/ready", headers=server.headers())
            return connection.getresponse().status == 200
    except (ServerError, OSError, http.client.HTTPException):  # not yet
        return False


def _user_error(log: Path) -> str | None:
    """Returns the error in the server's log that the user can fix; None if there is none."""
    found = re.search(r"^quintet serve: error: (.+)$", log.read_text(encoding="utf-8", errors="replace"), re.M)
    return found and found[1]


def _log_tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:]) or "(nothing)"
