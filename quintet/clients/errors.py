"""Errors between a client and a server, with messages that say what to do."""

import json
import ssl
from typing import Any

from quintet.common.suggestions import unknown_name_error

_MAX_MESSAGE = 300  # characters of a server's own words


class ServerError(ValueError):
    """A request that got no answer. `kind` is a short name for counting; `status` is set where HTTP gave one."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


def unreachable(where: str, error: OSError) -> ServerError:
    """Returns the error of a failed connection. `where` is the server's URL or its socket's path."""
    error = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(error, ssl.SSLError):
        return ServerError("tls", f"no TLS with {where}: {error}; is it http:// there?")
    if isinstance(error, TimeoutError):
        return ServerError("connection", f"cannot reach {where}: it did not take the connection in time")
    reason = error.strerror or str(error)
    if _refused(error):
        reason = f"nothing answers there ({reason}); start a server with {_how_to_serve(where)}, or give another --url"
    return ServerError("connection", f"cannot reach {where}: {reason}")


def _refused(error: OSError) -> bool:
    """True if the connection was refused. A loop that tried several addresses reports that in the message alone."""
    return isinstance(error, ConnectionRefusedError | FileNotFoundError) or "Connect call failed" in str(error)


def _how_to_serve(where: str) -> str:
    if "://" not in where:
        return f"`quintet serve --uds {where}`"
    port = where.rpartition(":")[2].strip("/")
    return f"`quintet serve --port {port}`" if port.isdigit() else "`quintet serve`"


def connection_broken(where: str, error: OSError | ValueError) -> ServerError:
    """The connection was there, and then not; or what came was no HTTP."""
    if isinstance(error, TimeoutError):
        return ServerError("timeout", f"{where} has been silent for too long: {error}")
    if isinstance(error, OSError):
        return ServerError("broken off", f"{where} broke the connection off before the answer was whole: {error}")
    return ServerError("not HTTP", f"{where} does not speak HTTP as it should: {error}")


def incompatible_server(where: str, what: str) -> ServerError:
    """Returns the error of a server that speaks HTTP, and not as OpenAI does."""
    return ServerError("not OpenAI", f"{where} is not an OpenAI-compatible server: {what}; give another --url")


def stream_error(where: str, error: Any) -> ServerError:
    """An error that arrived as an event, after the answer had begun."""
    return ServerError("error in stream", f"{where} ended the answer with an error: {_error_text(error)}")


def status_error(where: str, path: str, status: int, body: bytes) -> ServerError:
    """An answer other than 200; the server's own words are part of the message."""
    message = error_message(body)
    kind = f"HTTP {status}"
    if status in (401, 403):
        hint = "give another --api-key, or set OPENAI_API_KEY"
        return ServerError(kind, f"{where} wants another API key ({status}): {message}; {hint}", status)
    if status == 404 and path.startswith("/models/") and b'"model_not_found"' not in body:
        remedy = "`quintet ps` and `quintet stop` are for a server of several models (`quintet serve --models`)"
        return ServerError(kind, f"{where} serves one model, which stays loaded; {remedy}", status)
    if status == 404 and not _is_openai(body):
        return ServerError(kind, f"{where} has no {path}: is it an OpenAI-compatible server?", status)
    if 300 <= status < 400:
        return ServerError(kind, f"{where} redirects ({status}); give the address it redirects to as --url", status)
    return ServerError(kind, f"{where} answered {status}: {message}", status)


def unknown_model(where: str, name: str, served: list[str]) -> ServerError:
    """A model that the server does not have, with the nearest that it has."""
    return ServerError("HTTP 404", f"{where}: {unknown_name_error('model', name, served)}", 404)


def error_message(body: bytes) -> str:
    """The message of an error's body, in whichever of the usual shapes it comes."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return _printable(" ".join(body.decode(errors="replace").split())) or "without a word"
    return _error_text(answer)


def _error_text(answer: Any) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            answer = answer[key]
    return _printable(answer if isinstance(answer, str) else json.dumps(answer))


def _printable(text: str) -> str:
    """Returns a server's text in printable characters, for a terminal, and not too long."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."


def _is_openai(body: bytes) -> bool:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and ("error" in answer or "message" in answer)
