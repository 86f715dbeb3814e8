"""A collector of traces that the test reads: OTLP over HTTP, as OpenTelemetry's own protobuf says."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(ThreadingHTTPServer):
    """with Collector() as collector: ...; collector.wait(3)"""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.bodies = b""
        self.resource: dict[str, Any] = {}
        self.answers = threading.Event()  # else it keeps who sends waiting
        self.answers.set()
        self.news = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.answers.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.news:
            self.bodies += body
            for of_resource in request.resource_spans:
                self.resource = plain(of_resource.resource.attributes)
                self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
            self.news.notify_all()

    def wait(self, count: int, seconds: float = 60) -> list[Span]:
        """That many spans, in the order of their ends."""
        enough: Callable[[], bool] = lambda: len(self.spans) >= count  # noqa: E731
        with self.news:
            assert self.news.wait_for(enough, seconds), f"{len(self.spans)} spans of {count}"
            return sorted(self.spans, key=lambda span: span.end_time_unix_nano)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.answers.wait()
        status = 200 if self.path == "/v1/traces" else 404
        if status == 200:
            self.server.take(body)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
