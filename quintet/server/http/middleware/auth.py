"""Authentication: API keys and the owner of a request, allowed Host headers, allowed origins of web pages."""

import hashlib
import hmac
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.server.config import ServerConfig
from quintet.server.hosts import AllowedHosts, is_loopback
from quintet.server.http.errors import ApiError
from quintet.server.http.middleware.base import HTTP, WEBSOCKET, HttpMiddleware, route_path

PUBLIC_PATHS = ("/live", "/health", "/ping", "/ready", "/readyz")
# routes that change the engine for all clients
ADMIN_PATHS = (
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up",
    "/release_kv_cache_memory", "/shutdown_weight_transfer_engine", "/start_profile", "/stop_profile",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/init_weight_transfer_engine",
    "/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
    "/update_weight_version", "/abort_requests", "/weight_checker", "/collective_rpc",
)  # fmt: skip
_READ_METHODS = ("GET", "HEAD")
OWNER_HEADER = "x-quintet-owner"  # a router's name for its caller; in an answer: the server separates owners by it
_OWNER = re.compile("[0-9a-f]{64}")
_OWNER_PART = 32  # characters of an owner's name for the key; as many follow for the caller that a router names
_NO_PART = "0" * _OWNER_PART


def is_public(scope: Scope) -> bool:
    """True for liveness routes and the web page's static files."""
    path = route_path(scope)
    page = path == "/" or path.startswith("/page/")
    return scope.get("method") in _READ_METHODS and (page or path in PUBLIC_PATHS)


def owner_of(http: HTTPConnection) -> str:
    """Returns the owner of a request: a name of fixed length per API key, and per caller of a router (OWNER_HEADER);
    "" if there is at most one key and no router names a caller."""
    owner: str = http.scope.get("state", {}).get("owner", "")
    return owner


def key_of(owner: str) -> str:
    """Returns the part of an owner's name that is the key's; "" if there is at most one. A caller can invent names
    for OWNER_HEADER, so shares of capacity go by this part."""
    return "" if owner.startswith(_NO_PART) else owner[:_OWNER_PART]


class ApiKeys(HttpMiddleware):
    """Requires an API key as a bearer token or x-api-key; allows every client if there are no keys.

    If there is an admin key, administration needs it, and it also allows all other routes. Each of several keys is
    an owner: its requests and stored responses are not visible to other keys. A router that sends its own key for
    several callers names each in OWNER_HEADER. The name divides what belongs to that key, and gives access to nothing
    of another key.
    """

    scopes = (HTTP, WEBSOCKET)

    def __init__(self, app: ASGIApp, settings: ServerConfig, administration: Collection[str] = ADMIN_PATHS) -> None:
        super().__init__(app)
        self._administration = administration
        admin = settings.admin_api_key
        self._admin = None if admin is None else _digest(admin.encode())
        self._closed = bool(settings.api_key)
        keys = [_digest(key.encode()) for key in settings.api_key] + [self._admin] * (admin is not None)
        self._keys = [key for key in dict.fromkeys(keys) if key is not None]

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_public(scope):
            given = self._valid_keys(Headers(scope=scope))
            self._check(route_path(scope), given)
            named = Headers(scope=scope).get(OWNER_HEADER, "")
            if owner := self._owner(given, named):
                scope.setdefault("state", {})["owner"] = owner
            send = _acknowledging(send) if _OWNER.fullmatch(named) else send
        await self._app(scope, receive, send)

    def _owner(self, given: list[bytes], named: str) -> str:
        key = given[0].hex()[:_OWNER_PART] if given else _NO_PART
        part = key if len(self._keys) > 1 else _NO_PART
        if _OWNER.fullmatch(named) and named != key + _NO_PART:  # a router that passes the key on names the same owner
            return part + _digest(named.encode()).hex()[:_OWNER_PART]
        return "" if part == _NO_PART else part + _NO_PART

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

    def _valid_keys(self, headers: Headers) -> list[bytes]:
        """Returns the digests of the valid keys in the request."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if kind.lower() == "bearer" else None, headers.get("x-api-key")]
        found = []
        for digest in [_digest(each.encode("latin-1")) for each in given if each]:
            for key in self._keys:  # always compares all keys: constant time
                if hmac.compare_digest(digest, key):
                    found.append(key)
        return found


def _acknowledging(send: Send) -> Send:
    async def acknowledge(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (OWNER_HEADER.encode(), b"known")]
        await send(message)

    return acknowledge


def _digest(key: bytes) -> bytes:
    """Returns a digest of fixed length, so that comparison time does not reveal the key's length."""
    return hashlib.sha256(key).digest()


class LocalNames(HttpMiddleware):
    """Prevents web pages of other sites from calling this server through a user's browser (CSRF).

    A server on a loopback address accepts only Host names of this machine and of allowed_hosts: another name was
    pointed here from outside (DNS rebinding). Any other request than GET, HEAD or OPTIONS from a page of another
    origin needs that origin in allowed_origins: browsers may send it without a CORS preflight. So may they open a
    WebSocket.
    """

    scopes = (HTTP, WEBSOCKET)

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        super().__init__(app)
        self._origins = settings.allowed_origins
        self._hosts = AllowedHosts(settings.uds is None and is_loopback(settings.host), settings.allowed_hosts)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._hosts.allows(host):
            raise ApiError(
                421, f"this server does not answer to the name {host[:200]!r}; on its own machine ask for 127.0.0.1 or "
                "localhost, on other machines start it with --allowed-hosts and the name", code="wrong_host",
            )  # fmt: skip
        if (
            origin is not None
            and scope.get("method") not in (*_READ_METHODS, "OPTIONS")
            and not self._allows_origin(origin, host)
        ):
            raise ApiError(
                403, f"pages of {origin[:200]!r} may not use this server; --allowed-origins lets them",
                code="wrong_origin",
            )  # fmt: skip
        await self._app(scope, receive, send)

    def _allows_origin(self, origin: str, host: str | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return host is not None and origin.partition("://")[2].lower() == host.lower()
