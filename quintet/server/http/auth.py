"""Who may call, and as whom: API keys, the names under which a server on this machine may be reached, whose pages."""

import hashlib
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.server.hosts import Hosts, is_loopback
from quintet.server.http.asgi import Http, route_path
from quintet.server.http.errors import ApiError
from quintet.server.settings import ServerConfig

PUBLIC = ("/health", "/ready")
# what changes the engine for everybody
ADMINISTRATION = ("/reset_prefix_cache", "/sleep", "/wake_up", "/start_profile", "/stop_profile")
_READS = ("GET", "HEAD")


def is_public(scope: Scope) -> bool:
    """Liveness, and the page's own files: they hold nothing but the page."""
    path = route_path(scope)
    page = path == "/" or path.startswith("/page/")
    return scope["method"] in _READS and (page or path in PUBLIC)


def owner_of(http: HttpRequest) -> str:
    """Whose request it is: a name of one length for every key, or "" where one key, or none, is for all."""
    owner: str = http.scope.get("state", {}).get("owner", "")
    return owner


class ApiKeys(Http):
    """Lets those pass who bring a key, as a bearer token or as x-api-key; every caller where there are no keys.

    Where the administrator has a key, it alone opens administration, and it opens all the rest. Several keys are
    several owners: what one sends and stores, no other sees.
    """

    def __init__(self, app: ASGIApp, settings: ServerConfig, administration: Collection[str] = ADMINISTRATION) -> None:
        super().__init__(app)
        self._administration = administration
        admin = settings.admin_api_key
        self._admin = None if admin is None else _digest(admin.encode())
        self._closed = bool(settings.api_key)
        keys = [_digest(key.encode()) for key in settings.api_key] + [self._admin] * (admin is not None)
        self._keys = [key for key in dict.fromkeys(keys) if key is not None]

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_public(scope):
            given = self._given(Headers(scope=scope))
            self._check(route_path(scope), given)
            if given and len(self._keys) > 1:
                scope.setdefault("state", {})["owner"] = given[0].hex()[:32]
        await self._app(scope, receive, send)

    def _check(self, path: str, given: list[bytes]) -> None:
        administers = self._admin is not None and path in self._administration
        if not given and (self._closed or administers):
            raise ApiError(
                401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        if administers and self._admin not in given:
            raise ApiError(
                403, f"{path} is for the administrator alone, and asks for that key (--admin-api-key)",
                code="admin_only",
            )  # fmt: skip

    def _given(self, headers: Headers) -> list[bytes]:
        """The digests of those keys of ours that the request brings."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if kind.lower() == "bearer" else None, headers.get("x-api-key")]
        found = []
        for digest in [_digest(each.encode("latin-1")) for each in given if each]:
            for key in self._keys:  # all of them, always: time tells nothing
                if hmac.compare_digest(digest, key):
                    found.append(key)
        return found


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key's."""
    return hashlib.sha256(key).digest()


class Neighbours(Http):
    """Keeps other sites' pages from calling this server through a visitor's browser.

    A server that only this machine reaches answers to this machine's names, and to those in allowed_hosts: another name
    that leads here was pointed here from outside (DNS rebinding). A request that changes something, sent by a page of
    another origin, needs that origin in allowed_origins; browsers send such requests without asking first.
    """

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        super().__init__(app)
        self._origins = settings.allowed_origins
        self._hosts = Hosts(settings.uds is None and is_loopback(settings.host), settings.allowed_hosts)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._hosts.answers_to(host):
            raise ApiError(
                421, f"this server does not answer to the name {host[:200]!r}; on its own machine ask for 127.0.0.1 or "
                "localhost, elsewhere start it with --allowed-hosts and the name", code="wrong_host",
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
