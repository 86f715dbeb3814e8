"""The ground of our middlewares: HTTP alone, the path as the router sees it, and the connection below."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send


class Http(ABC):
    """Passes on all but HTTP: nothing else is spoken here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What it does with a request."""


def route_path(scope: Scope) -> str:
    """The path below the prefix that a proxy strips."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def speaks_anthropic(scope: Scope) -> bool:
    """Whether the client reads Anthropic's shapes: on its own routes, and by its header where both have one."""
    path = route_path(scope)
    named = path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    return named or path.startswith("/v1/messages")


class Wire(Protocol):
    """The connection that a request came by."""

    @property
    def stuck(self) -> bool:
        """Whether its reader has stopped reading: what is sent waits."""
        ...

    def cut(self) -> None:
        """Ends it now; what was not read is lost."""
        ...

    def welcome(self) -> bool:
        """Gives it a place among those whose requests are let in; False: they are too many."""
        ...


def wire_of(scope: Scope) -> Wire | None:
    """None where there is no socket below."""
    find: Callable[[], Wire | None] | None = scope.get("state", {}).get("wire")
    return None if find is None else find()
