"""Listening socket of a server: made before anything slow, so that a port in use is reported at once."""

import errno
import os
import socket
import stat

from quintet.server.config import ServerConfig
from quintet.server.tls import make_context

_BACKLOG = 2048  # connections that wait to be accepted


def listen(settings: ServerConfig) -> socket.socket:
    """Returns the listening socket. OSError or ValueError has the reason why not, and what to do."""
    return _unix(settings.uds) if settings.uds else _port(settings.host, settings.port)


def check_certificate(settings: ServerConfig) -> None:
    """ValueError if the TLS files cannot be used."""
    if settings.ssl_certfile is not None:
        make_context(settings)


def _port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ValueError(f"host {host!r} is no address of this machine: {error.strerror}") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(error.errno, _listen_error(error, host, port)) from None
    made.listen(_BACKLOG)
    return made


def _listen_error(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; end what listens there, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is kept for the administrator; choose one from 1024 on with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _unix(path: str) -> socket.socket:
    """A socket file of a server that has died is replaced, anything else is left alone."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            _remove_stale(path)
        made.bind(path)
        os.chmod(path, 0o600)  # the right to open the file is the right to use the model
    except (OSError, ValueError) as error:
        made.close()
        raise type(error)(f"cannot listen on {path}: {error}") from None
    made.listen(_BACKLOG)
    return made


def _remove_stale(path: str) -> None:
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ValueError("there is a file that is no socket; remove it, or choose another with --uds")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1)
        probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        os.unlink(path)
    else:
        raise ValueError("a server listens there; end it, or choose another with --uds")
    finally:
        probe.close()
