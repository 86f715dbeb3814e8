"""The ground of our middlewares: HTTP alone, and the path as the router sees it."""

from abc import ABC, abstractmethod

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
