"""Download and upload of files by http(s) address, such as presigned ones of a store: bounded, queries not shown.

A presigned address is a key: what is after its "?" stands in no message. Connects itself, through no proxy.
"""

import http.client
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import SplitResult, urljoin, urlsplit

from quintet.clients import errors
from quintet.clients.batch_files import retry_after
from quintet.clients.http_client import HttpResponse
from quintet.clients.http_connection import CONNECT_SECONDS

MAX_REDIRECTS = 5
MAX_TRIES = 5  # to send a file
IDLE_SECONDS = 60.0  # seconds without a byte
MAX_SECONDS = 3600.0  # seconds for a file
MAX_WAIT = 60.0  # seconds before the next try, whatever the server says
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_SAME_METHOD_REDIRECTS = (307, 308)  # a PUT stays a PUT. Source: RFC 9110, 15.4
_RETRY_STATUSES = (408, 425, 429)  # and 5xx
_CHUNK = 2**20  # bytes
_MAX_ERROR_BODY = 2**16  # bytes of a refusal that are read


def is_url(name: str) -> bool:
    """True if it is an address and no file. ValueError for one that is neither http nor https, or unclear."""
    scheme, separator, _ = name.partition("://")
    if not separator or not scheme.isalnum():
        return False
    _parts(name)
    return True


def without_query(url: str) -> str:
    """The address as messages have it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def fetch(url: str, sink: IO[bytes], most: int) -> int:
    """Writes what is there to the sink -> bytes. ServerError if it is more than `most`, or cannot be had whole."""
    end = time.monotonic() + MAX_SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        with _answer("GET", url) as answer:
            if answer.status in _REDIRECT_STATUSES:
                url = _redirect_url(url, answer)
            elif answer.status == 200:
                return _copy(url, answer, sink, most, end)
            else:
                raise _status_error("GET", url, answer.status, answer.read(_MAX_ERROR_BODY))
    raise _too_many_redirects(url)


def send(url: str, path: Path, pause: Callable[[float], None] = time.sleep) -> None:
    """Puts the file there; what may pass (no connection, 429, 5xx) is tried again. ServerError if that is in vain."""
    for turn in range(MAX_TRIES):
        wait = 2.0**turn
        try:
            answer, body = _put(url, path)
        except errors.ServerError as error:
            if error.kind in ("tls", "redirects", "redirect") or turn == MAX_TRIES - 1:
                raise
        else:
            if 200 <= answer.status < 300:
                return
            if turn == MAX_TRIES - 1 or not (answer.status in _RETRY_STATUSES or answer.status >= 500):
                raise _status_error("PUT", url, answer.status, body)
            wait = retry_after(answer, wait)
        pause(min(wait, MAX_WAIT))


def _put(url: str, path: Path) -> tuple[HttpResponse, bytes]:
    """One try -> the last answer and the beginning of its body."""
    for _ in range(MAX_REDIRECTS + 1):
        with path.open("rb") as body, _answer("PUT", url, body) as answer:
            if answer.status not in _SAME_METHOD_REDIRECTS:
                headers = {name.lower(): value for name, value in answer.getheaders()}
                return HttpResponse(answer.status, headers), answer.read(_MAX_ERROR_BODY)
            url = _redirect_url(url, answer)
    raise _too_many_redirects(url)


def _too_many_redirects(url: str) -> errors.ServerError:
    message = f"{without_query(url)} is where {MAX_REDIRECTS} redirects lead, and it leads on; give the last address"
    return errors.ServerError("redirects", message)


def _parts(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{parts.scheme}:// is not served; give a file, or an address with http:// or https://")
    if not (url.isascii() and url.isprintable()) or " " in url or not parts.hostname:
        raise ValueError(f"{without_query(url)!r} is no address in plain ASCII; write other characters as %XX")
    if parts.username is not None:
        raise ValueError(f"the address on {parts.hostname} holds a user; give a presigned one instead")
    try:
        parts.port  # noqa: B018  # it is read to see whether it can be
    except ValueError:
        raise ValueError(f"{without_query(url)!r} has no port from 1 to 65535") from None
    return parts


@contextmanager
def _answer(method: str, url: str, body: IO[bytes] | None = None) -> Iterator[http.client.HTTPResponse]:
    """One exchange on a connection of its own."""
    parts, where = _parts(url), without_query(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, parts.port, timeout=CONNECT_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=CONNECT_SECONDS)
    headers = {"user-agent": "quintet", "accept-encoding": "identity"}
    if body is not None:
        headers["content-length"] = str(os.fstat(body.fileno()).st_size)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise _unreachable(where, error) from None
        connection.sock.settimeout(IDLE_SECONDS)
        connection.request(method, (parts.path or "/") + f"?{parts.query}" * bool(parts.query), body, headers)
        yield connection.getresponse()
    except http.client.HTTPException as error:
        raise errors.connection_broken(where, ConnectionError(type(error).__name__)) from None
    except OSError as error:
        raise errors.connection_broken(where, error) from None
    finally:
        connection.close()


def _unreachable(where: str, error: OSError) -> errors.ServerError:
    kind = "tls" if isinstance(error, ssl.SSLError) else "connection"
    return errors.ServerError(kind, f"cannot reach {where}: {error.strerror or error or type(error).__name__}")


def _redirect_url(url: str, answer: http.client.HTTPResponse) -> str:
    """Returns the address of a redirect: http or https, and never from https to http."""
    found = urljoin(url, answer.getheader("location") or "")
    try:
        parts = _parts(found)
    except ValueError as error:
        raise errors.ServerError("redirect", f"{without_query(url)} redirects to an invalid address: {error}") from None
    if urlsplit(url).scheme == "https" and parts.scheme != "https":
        raise errors.ServerError(
            "redirect", f"{without_query(url)} leads from https to http; give an address that stays"
        )
    return found


def _copy(url: str, answer: http.client.HTTPResponse, sink: IO[bytes], most: int, end: float) -> int:
    size, length = 0, answer.length
    while size <= most and (piece := answer.read1(_CHUNK)):
        size += len(piece)
        if time.monotonic() > end:
            raise errors.ServerError(
                "timeout", f"{without_query(url)} took more than {MAX_SECONDS:g} s; fetch it beforehand"
            )
        try:
            sink.write(piece)
        except OSError as error:
            why = f"{without_query(url)} cannot be kept here: {error.strerror}; give --output-tmp-dir another folder"
            raise errors.ServerError("file", why) from None
    if size > most:
        raise errors.ServerError(
            "too long", f"{without_query(url)} has more than {most} bytes; --max-input-bytes allows more"
        )
    if length is not None and size < length:
        raise errors.connection_broken(without_query(url), ConnectionError(f"{size} of {length} bytes came"))
    return size


def _status_error(method: str, url: str, status: int, body: bytes) -> errors.ServerError:
    hint = "; a presigned address holds for a while, and for one method alone" if status in (401, 403) else ""
    why = f"{without_query(url)} answered {status} to {method}: {errors.error_message(body)}{hint}"
    return errors.ServerError(f"HTTP {status}", why, status)
