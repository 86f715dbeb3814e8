"""Middleware that counts responses by route, and starts a trace span for each POST."""

from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.server.http.app_state import AppState
from quintet.server.http.middleware.base import HttpMiddleware
from quintet.server.tracing import RequestSpan

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_BROKEN = 500  # status if the app began no response


class HttpMetrics(HttpMiddleware):
    """Counts each response by its route; responses before routing have none."""

    def __init__(self, app: ASGIApp, service: AppState) -> None:
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
                self._service.metrics.record_duration(_route(scope) or "none", _method(scope), perf_counter() - begun)
            if span is not None:
                span.end(status, _route(scope))

    def _begin(self, scope: Scope) -> RequestSpan | None:
        if self._service.tracer is None or scope["method"] != "POST":
            return None
        return self._service.tracer.start_span(scope)

    def _count(self, scope: Scope, status: int) -> None:
        self._service.metrics.count_response(_route(scope) or "none", _method(scope), status)


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "other"


def _route(scope: Scope) -> str | None:
    """Returns the template of the matched route, such as /v1/responses/{response_id}."""
    return getattr(scope.get("route"), "path", None)
