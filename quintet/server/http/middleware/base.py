"""Base class of our middlewares (HTTP only), the path as the router sees it, and the client connection."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

HTTP, WEBSOCKET = "http", "websocket"  # types of ASGI scopes


class HttpMiddleware(ABC):
    """A middleware for HTTP requests; passes other ASGI scopes through, unless `scopes` names them."""

    scopes: ClassVar[tuple[str, ...]] = (HTTP,)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in self.scopes:
            await self.serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles an HTTP request."""


def route_path(scope: Scope) -> str:
    """Returns the path without the root_path prefix that a proxy strips."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def wants_anthropic(scope: Scope) -> bool:
    """True if the client expects Anthropic's format: on its routes, and by its header on /v1/models of both APIs."""
    path = route_path(scope)
    named = path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    return named or path.startswith("/v1/messages")


def wants_ollama(scope: Scope) -> bool:
    """True if the client expects Ollama's format: below /api, but for the versioned paths of LM Studio."""
    return re.match("/api/(?!v[0-9])", route_path(scope)) is not None


class ClientConnection(Protocol):
    """The connection of a request."""

    @property
    def is_stuck(self) -> bool:
        """True if the client has stopped reading: sent data waits."""
        ...

    def disconnect(self) -> None:
        """Closes it now; unread data is lost."""
        ...

    def mark_authenticated(self) -> bool:
        """Gives it a place among the authenticated connections; returns False if there are too many."""
        ...


def connection_of(scope: Scope) -> ClientConnection | None:
    """Returns the connection of a request; None without a socket."""
    find: Callable[[], ClientConnection | None] | None = scope.get("state", {}).get("wire")
    return None if find is None else find()
