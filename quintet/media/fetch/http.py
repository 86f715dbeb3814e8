"""Fetches one URL over HTTP, from an address that was checked, within a time and a number of bytes.

A name is resolved once, and the address that was checked is the one that is dialled: a second answer of the resolver
could be another. TLS and the Host header have the name. No proxy of the environment is used, and no cookies or
credentials are sent.
"""

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from quintet import __version__
from quintet.media.errors import MediaError
from quintet.media.fetch.addresses import MAX_ADDRESSES, is_public, resolve_host

MAX_URL = 8192  # characters
MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}
_PIECE = 2**16  # bytes that are read at once
_REDIRECTS = (301, 302, 303, 307, 308)
_TARGET = "!$%&'()*+,;=:@/?-._~"  # characters that a path and a query keep; others are percent-encoded


@dataclass(frozen=True)
class FetchRules:
    """Rules of what may be fetched over HTTP."""

    domains: tuple[str, ...] = ()  # hosts, in lower case; none: nothing is fetched
    is_allowed: Callable[[str], bool] = is_public  # an address, as text
    resolve: Callable[[str, int, float], Sequence[str]] = resolve_host  # host, port, seconds -> its addresses
    clock: Callable[[], float] = time.monotonic
    tls: Callable[[], ssl.SSLContext] = field(default=ssl.create_default_context)


class _Target(NamedTuple):
    """A URL taken apart, of a host that is allowed."""

    scheme: str
    host: str
    port: int
    path: str  # with the query

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


def fetch(url: str, rules: FetchRules, max_bytes: int, timeout: float) -> bytes:
    """Returns the body that a URL has. Redirects are followed by the same rules.

    MediaError if it is not allowed, fails, takes longer than `timeout` seconds or has more than `max_bytes`.
    """
    deadline = _Deadline(rules.clock, timeout)
    for _ in range(MAX_REDIRECTS + 1):
        target = _target(url, rules)
        answer = _Answer(target, rules, deadline)
        try:
            if answer.location is None:
                return answer.body(max_bytes)
            onward = urljoin(url, answer.location)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise error if isinstance(error, MediaError) else _failed(target, error, deadline) from None
        finally:
            answer.close()
        if target.scheme == "https" and not onward.lower().startswith("https:"):
            raise MediaError(f"{target.host} redirects from https to another scheme; give the URL that it leads to")
        url = onward
    raise MediaError(f"its URL redirects more than {MAX_REDIRECTS} times; give the URL that it leads to")


def _target(url: str, rules: FetchRules) -> _Target:
    if len(url) > MAX_URL:
        raise MediaError(f"its URL has {len(url)} characters, and {MAX_URL} is the most; give a shorter one")
    if not url.isprintable() or " " in url or "\\" in url:
        raise MediaError("its URL has white space, backslashes or control characters; write them percent-encoded")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        name = host if ":" in host else host.removesuffix(".").encode("idna").decode().lower()
    except (ValueError, UnicodeError) as error:
        raise MediaError(f"its URL is damaged: {str(error)[:200]}; write https://host/path") from None
    if parts.scheme not in _PORTS or not name:
        raise MediaError("its URL is neither http nor https with a host; write https://host/path")
    if "@" in parts.netloc:
        raise MediaError("its URL has a user name or password, which is never sent; leave it out")
    if name not in rules.domains:
        raise MediaError(_not_allowed(name, rules))
    if port == 0:
        raise MediaError("its URL has port 0; write another")
    path = quote(parts.path or "/", safe=_TARGET) + (f"?{quote(parts.query, safe=_TARGET)}" if parts.query else "")
    return _Target(parts.scheme, name, port or _PORTS[parts.scheme], path)


def _not_allowed(host: str, rules: FetchRules) -> str:
    known = "; it fetches from " + ", ".join(rules.domains[:8]) if rules.domains else ", and none is allowed"
    return (
        f"the host {host[:100]!r} is not among those that this server fetches from (--allowed-media-domains){known}; "
        "send the bytes as a data: URL"
    )


class _Deadline:
    """The end of a fetch, redirects included."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Returns the seconds that are left. TimeoutError if there are none."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimeoutError
        return left


class _Answer:
    """The response to one GET; its connection is closed with it."""

    def __init__(self, target: _Target, rules: FetchRules, deadline: _Deadline) -> None:
        self._target = target
        self._socket: _TimedSocket | None = None
        try:
            address = _address(target, rules, deadline)
            self._socket = _TimedSocket(_connect(address, target, rules, deadline), deadline)
            connection = http.client.HTTPConnection(target.host, target.port)
            connection.sock = self._socket
            connection.request("GET", target.path, headers={
                "Host": target.host_header, "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close",
                "User-Agent": f"quintet/{__version__}",
            })  # fmt: skip
            self._response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise error if isinstance(error, MediaError) else _failed(target, error, deadline) from None

    @property
    def location(self) -> str | None:
        """Returns where the response redirects to, None if it has the body. MediaError for a failure."""
        status = self._response.status
        if status == 200:
            return None
        if status in _REDIRECTS and (location := self._response.headers.get("Location")):
            return str(location)
        raise MediaError(f"{self._target.host} answers with HTTP status {status}; look at the URL, or send a data: URL")

    def body(self, max_bytes: int) -> bytes:
        """Returns all bytes. MediaError if there are more than `max_bytes`, or fewer than announced."""
        if self._response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaError(f"{self._target.host} compresses it, which was not asked for; send a data: URL")
        announced = self._response.length
        if announced is not None and announced > max_bytes:
            raise _too_large(max_bytes)
        found = bytearray()
        while piece := self._response.read1(_PIECE):
            found += piece
            if len(found) > max_bytes:
                raise _too_large(max_bytes)
        if announced is not None and len(found) < announced:
            raise MediaError(f"{self._target.host} sends {len(found)} of {announced} bytes; try again")
        return bytes(found)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.disconnect()


def _address(target: _Target, rules: FetchRules, deadline: _Deadline) -> str:
    """Returns the first address of a host. MediaError if one of them is not public: it might be taken the next time."""
    addresses = rules.resolve(target.host, target.port, deadline.left())
    if not addresses or len(addresses) > MAX_ADDRESSES:
        raise MediaError(f"{target.host} has {len(addresses)} addresses; give another URL")
    if not all(rules.is_allowed(each) for each in addresses):
        raise MediaError(
            f"{target.host} has an address that is not on the public internet, from which nothing is fetched; send the "
            "bytes as a data: URL"
        )
    return addresses[0]


def _connect(address: str, target: _Target, rules: FetchRules, deadline: _Deadline) -> socket.socket:
    plain = socket.create_connection((address, target.port), deadline.left())
    if target.scheme == "http":
        return plain
    try:
        plain.settimeout(deadline.left())
        return rules.tls().wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise


class _TimedSocket:
    """A socket of which each operation ends at the deadline, as http.client uses one."""

    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        self._socket, self._deadline = connected, deadline

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(self._deadline.left())
        self._socket.sendall(data)

    def recv_into(self, buffer: Any) -> int:
        self._socket.settimeout(self._deadline.left())
        return self._socket.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_RawReader(self))

    def close(self) -> None:
        """Does nothing: http.client calls it before it reads the body."""

    def disconnect(self) -> None:
        self._socket.close()


class _RawReader(io.RawIOBase):
    """The bytes that come over a socket."""

    def __init__(self, source: _TimedSocket) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.recv_into(buffer)


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"it has more than {max_bytes} bytes; send a smaller one")


def _failed(target: _Target, error: Exception, deadline: _Deadline) -> MediaError:
    if isinstance(error, TimeoutError):
        return MediaError(
            f"{target.host} took longer than {deadline.seconds:g} s; send the bytes as a data: URL, or raise "
            "VLLM_IMAGE_FETCH_TIMEOUT (or _VIDEO_, _AUDIO_)"
        )
    shown = " ".join(str(error).encode(errors="replace").decode()[:200].split())
    return MediaError(f"{target.host} cannot be fetched from ({type(error).__name__}: {shown}); send a data: URL")
