"""OpenTelemetry: a span for each API request, sent in batches by a thread of its own. No text of prompts or answers."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import Scope

from quintet import __version__
from quintet.common.distribution import install_hint
from quintet.engine.observability.request_stats import ERROR
from quintet.server.http.errors import ApiError, ClientGone

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from quintet.server.http.usage import RequestUsage
    from quintet.server.metrics.call_record import CallRecord

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 3.0  # seconds that the last spans get at the server's end
_EXPORT = 5.0  # seconds that a collector may take for a batch
_PATH = "/v1/traces"  # OTLP's own, where the endpoint has none
_KEY = "quintet.span"  # in the HTTP request's scope


def make_tracer(endpoint: str | None, model: Callable[[], str]) -> "Tracer | None":
    """None where no collector is given. Raises ValueError for an address that is none, or without OpenTelemetry."""
    if endpoint is None:
        return None
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"otlp_traces_endpoint must be an http or https URL, not {endpoint!r}")
    if address.path in ("", "/"):
        endpoint = address._replace(path=_PATH).geturl()
    try:
        provider = _provider(endpoint)
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint needs OpenTelemetry ({error}); run: {install_hint('tracing')}"
        ) from None
    return Tracer(provider, model)


class Tracer:
    """One for each API process."""

    def __init__(self, provider: "TracerProvider", model: Callable[[], str]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("quintet", __version__)
        self._extract = TraceContextTextMapPropagator().extract

    def start_span(self, scope: Scope) -> "RequestSpan":
        """The span of an HTTP request; its headers may name a parent. of() finds it again."""
        from opentelemetry.trace import SpanKind

        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        known = {"http.request.method": str(scope["method"])}
        tally: RequestUsage | None = scope.get("state", {}).get("tally")
        if tally is not None:
            known["gen_ai.request.id"] = tally.request_id  # as in the log and the response's header
        span = self._tracer.start_span("POST", self._extract(carrier), SpanKind.SERVER, attributes=known)
        made = scope[_KEY] = RequestSpan(span, self._model)
        return made

    def span_of(self, http: HttpRequest | None) -> "RequestSpan":
        """The request's own; a call that no HTTP request waits for has one to itself."""
        held: RequestSpan | None = None if http is None else http.scope.get(_KEY)
        if held is not None:
            return held
        return RequestSpan(self._tracer.start_span("background"), self._model, alone=True)

    def close(self) -> None:
        """Sends what is left, for FLUSH_SECONDS seconds at most; the thread that goes on ends with the process."""
        ending = threading.Thread(target=self._provider.shutdown, name="quintet-traces", daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        if ending.is_alive():
            logger.warning("the last traces were not sent: the collector took longer than %g s", FLUSH_SECONDS)


class RequestSpan:
    """Takes in what a call did, and ends with the HTTP response; `alone`, with the call."""

    def __init__(self, span: "Span", model: Callable[[], str], alone: bool = False) -> None:
        self._span, self._model, self._alone = span, model, alone
        self._failed = False

    def record_call(self, record: "CallRecord") -> None:
        """A call is over. Source: OpenTelemetry's semantic conventions for generative AI, "Spans"."""
        if self._span.is_recording():
            attributes = {
                **_request_attributes(record),
                **_response_attributes(record),
                "gen_ai.request.model": self._model(),
            }
            self._span.set_attributes({"gen_ai.provider.name": "quintet", **attributes})
            self._record_failure(record)
        if self._alone:
            self._span.end()

    def end(self, status: int, route: str | None) -> None:
        """The HTTP response is over."""
        if self._span.is_recording():
            self._span.set_attribute("http.response.status_code", status)
            if route is not None:
                self._span.update_name(f"POST {route}")
                self._span.set_attribute("http.route", route)
            if route in _OPERATIONS:
                self._span.set_attribute("gen_ai.operation.name", _OPERATIONS[route])
            if status >= 400:
                self.fail(str(status), ours=status >= 500)
        self._span.end()

    def _record_failure(self, record: "CallRecord") -> None:
        """A client that hangs up is no error of the server's."""
        if isinstance(record.why, ClientGone):
            self.fail("client_gone", ours=False)
        elif isinstance(record.why, ApiError):
            self.fail(record.why.code or str(record.why.status))
        elif record.why is not None:
            self.fail(type(record.why).__name__)
        elif any(ERROR in watch.reasons for watch in record.watches):
            self.fail("request_failed")

    def fail(self, kind: str, ours: bool = True) -> None:
        """The first reason is the one. No message: it may quote the request."""
        from opentelemetry.trace import Status, StatusCode

        if self._failed:
            return
        self._failed = True
        self._span.set_attribute("error.type", kind)
        if ours:
            self._span.set_status(Status(StatusCode.ERROR, kind))


_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "transcription",
}


def _request_attributes(record: "CallRecord") -> Mapping[str, Any]:
    """All asks of a call have the same parameters. One that ended before it asked anything has none."""
    if not record.asks:
        return {}
    pooling = record.asks[0].pooling
    if pooling is not None:
        return {} if pooling.dimensions is None else {"gen_ai.embeddings.dimension.count": pooling.dimensions}
    params = record.asks[0].params
    asked = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "choice.count": params.n if params.n != 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}


def _response_attributes(record: "CallRecord") -> Mapping[str, Any]:
    """Tokens, ends and times. The call's first token is the first of any of its requests."""
    times = [watch.times for watch in record.watches if watch.times is not None]
    first = [each.time_to_first_token for each in times if each.time_to_first_token is not None]
    whole = [each.latency for each in times if each.latency is not None]
    given: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(len(ask.prompt.token_ids) for ask in record.asks),
        "gen_ai.usage.output_tokens": sum(sum(watch.counts) for watch in record.watches),
        "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached_tokens for each in times),
    }
    if not record.asks or record.asks[0].pooling is None:
        reasons = [reason for watch in record.watches for reason in watch.reasons]
        given["gen_ai.response.finish_reasons"] = reasons
    if first:
        given["gen_ai.latency.time_to_first_token"] = min(first)
    if whole and len(whole) == len(record.watches):
        given["gen_ai.latency.e2e"] = max(whole)
    return given


def _provider(endpoint: str) -> "TracerProvider":
    """Its resource takes OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, as everywhere in OpenTelemetry."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = Resource({"service.name": "quintet", "service.version": __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    exporter = _log_once(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT), endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _log_once(exporter: "SpanExporter", endpoint: str) -> "SpanExporter":
    """The same, but the log says once that the collector takes no spans, and once that it does again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Told(SpanExporter):
        down = False

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            result = exporter.export(spans)
            down = result is not SpanExportResult.SUCCESS
            if down and not self.down:
                logger.warning("the collector at %s takes no traces; they are dropped until it does", endpoint)
            elif self.down and not down:
                logger.info("the collector at %s takes traces again", endpoint)
            self.down = down
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would tell of every batch
    return Told()
