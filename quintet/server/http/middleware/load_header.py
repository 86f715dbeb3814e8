"""Reports engine load in a response header (ORCA), for load balancers."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.engine.observability.stats import Stats
from quintet.server.http.app_state import AppState
from quintet.server.http.middleware.base import HttpMiddleware, route_path
from quintet.server.http.sse import encode

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


class LoadReport(HttpMiddleware):
    """Adds the load report to responses of requests that ask for it. Place it behind authentication."""

    def __init__(self, app: ASGIApp, service: AppState) -> None:
        super().__init__(app)
        self._service = service

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = Headers(scope=scope).get(REQUEST_HEADER, "")
        if not form or scope["method"] != "POST" or not route_path(scope).startswith("/v1/"):
            await self._app(scope, receive, send)
            return

        async def tell(message: Message) -> None:
            stats = self._service.backend.stats() if message["type"] == "http.response.start" else None
            header = None if stats is None else load_report(form, stats)
            if header is not None:
                MutableHeaders(scope=message)[RESPONSE_HEADER] = header
            await send(message)

        await self._app(scope, receive, tell)


def load_report(form: str, stats: Stats) -> str | None:
    """Returns the report as TEXT or JSON, with vLLM's names; None for other formats (BIN is protobuf in base64).

    Source: xds.data.orca.v3.OrcaLoadReport, and Envoy's description of its forms.
    """
    queues = stats.scheduler
    named = {"kv_cache_usage_perc": float(queues.kv_usage), "num_requests_waiting": float(queues.num_waiting)}
    match form.strip().lower():
        case "text":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        case "json":
            return "JSON " + encode({"named_metrics": named}).decode()
    return None
