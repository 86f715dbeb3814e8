"""A layer of the HTTP app around all that answers: counts responses by their route, and gives each POST its span."""

from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.server.http.asgi import Http
from quintet.server.http.service import Service
from quintet.server.tracing import RequestSpan

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_BROKEN = 500  # no answer was begun: the app is to blame


class Counted(Http):
    """Knows the route once it was found; what is answered before has none."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(app)
        self._service = service

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, started, begun = _BROKEN, False, perf_counter()
        span = self._begin(scope)

        async def tell(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                self._count(scope, status)
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except Exception as error:
            if span is not None:
                span.fail(type(error).__name__)
            raise
        finally:
            if started:
                self._service.metrics.lasted(_route(scope) or "none", _method(scope), perf_counter() - begun)
            if span is not None:
                span.end(status, _route(scope))

    def _begin(self, scope: Scope) -> RequestSpan | None:
        if self._service.tracer is None or scope["method"] != "POST":
            return None
        return self._service.tracer.begin(scope)

    def _count(self, scope: Scope, status: int) -> None:
        self._service.metrics.responded(_route(scope) or "none", _method(scope), status)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _route(scope: Scope) -> str | None:
    """The template of the route that was found, such as /v1/responses/{response_id}."""
    return getattr(scope.get("route"), "path", None)
