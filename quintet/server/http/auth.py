"""Who may call: API keys, the names under which a server on this machine may be reached, and whose pages."""

import hashlib
import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.server.http.asgi import Http, route_path
from quintet.server.http.errors import ApiError
from quintet.server.listen import is_loopback
from quintet.server.settings import ServerConfig

PUBLIC = ("/health", "/ready")
_READS = ("GET", "HEAD")


def is_public(scope: Scope) -> bool:
    """Liveness, and the page's own files: they hold nothing but the page."""
    path = route_path(scope)
    page = path == "/" or path.startswith("/page/")
    return scope["method"] in _READS and (page or path in PUBLIC)


class ApiKeys(Http):
    """Lets those pass who bring a key, as a bearer token or as x-api-key; every caller where there are no keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        super().__init__(app)
        self._keys = [_digest(key.encode()) for key in keys]

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and not is_public(scope) and not self._knows(Headers(scope=scope)):
            raise ApiError(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        await self._app(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key"), token.strip() if kind.lower() == "bearer" else None]
        digests = [_digest(each.encode("latin-1")) for each in given if each]
        found = False
        for digest in digests:
            for key in self._keys:  # all of them, always: time tells nothing
                found |= hmac.compare_digest(digest, key)
        return found


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key's."""
    return hashlib.sha256(key).digest()


class Neighbours(Http):
    """Keeps other sites' pages from calling this server through a visitor's browser.

    A server that only this machine reaches answers to this machine's names alone: another name that leads here was
    pointed here from outside (DNS rebinding). A request that changes something, sent by a page of another origin, needs
    that origin in allowed_origins; browsers send such requests without asking first.
    """

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        super().__init__(app)
        self._origins = settings.allowed_origins
        self._local = settings.uds is None and is_loopback(settings.host)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if self._local and host is not None and not _is_local(host):
            raise ApiError(
                403, f"this server is for its own machine, and {host[:200]!r} is no name of it; use 127.0.0.1 or "
                "localhost, or let it listen on an address with --host", code="wrong_host",
            )  # fmt: skip
        if origin is not None and scope["method"] not in (*_READS, "OPTIONS") and not self._welcomes(origin, host):
            raise ApiError(
                403, f"pages of {origin[:200]!r} may not use this server; --allowed-origins lets them",
                code="wrong_origin",
            )  # fmt: skip
        await self._app(scope, receive, send)

    def _welcomes(self, origin: str, host: str | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return host is not None and origin.partition("://")[2].lower() == host.lower()


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half an IPv6 address
        return False
    return name.endswith(".localhost") or is_loopback(name)
