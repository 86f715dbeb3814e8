"""Counters and histograms of one API process."""

from collections.abc import Awaitable, Callable

from quintet.common.metric_types import CounterSeries, HistogramSeries, MetricSample
from quintet.engine.observability.request_stats import RequestStats
from quintet.server.metrics.catalogue import API_METRICS

# HTTP status -> why a request was turned away
_REFUSALS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "invalid",
    409: "invalid",
    413: "too_large",
    415: "invalid",
    421: "forbidden",
    422: "invalid",
    429: "overloaded",
    431: "too_large",
    503: "unavailable",
}
_PROBES = {"/live", "/health", "/ready", "/ping", "/metrics"}
_UNCOUNTED = _PROBES | {"/version", "/load"}  # routes that vLLM's HTTP metrics leave out


async def _no_others() -> tuple[list[MetricSample], int]:
    return [], 0


class ApiMetrics:
    """Metrics of one API process, for one event loop. `requests` has the times and tokens of requests."""

    def __init__(self) -> None:
        self._known = {metric.name: metric for metric in API_METRICS}
        self._series: dict[tuple[str, tuple[str, ...]], CounterSeries | HistogramSeries] = {}
        self.connections: Callable[[], int] = int  # number of open connections
        self.calls: Callable[[], int] = int  # number of calls in progress
        # rows of the other API processes, and how many did not answer
        self.gather_others: Callable[[], Awaitable[tuple[list[MetricSample], int]]] = _no_others
        self.requests = RequestStats()
        self.aborted = self._counter("quintet:requests_aborted_total")
        for reason in sorted(set(_REFUSALS.values())):
            self._counter("quintet:requests_refused_total", reason)

    def count_response(self, route: str, method: str, status: int) -> None:
        """Counts a response that has begun. The route is a template, so that label values are few."""
        self._counter("quintet:http_requests_total", route, method, str(status)).add()
        if status in _REFUSALS and route not in _PROBES and method != "HEAD":
            self._counter("quintet:requests_refused_total", _REFUSALS[status]).add()
        if route not in _UNCOUNTED:
            self._counter("http_requests_total", route, method, f"{status // 100}xx").add()

    def record_duration(self, route: str, method: str, seconds: float) -> None:
        """Records the duration of a response that was sent or broken off."""
        if route not in _UNCOUNTED:
            self._histogram("http_request_duration_seconds", route, method).observe(seconds)

    def rows(self) -> list[MetricSample]:
        """Returns all series with their current values."""
        rows = [MetricSample(name, labels, series.sample_values()) for (name, labels), series in self._series.items()]
        rows += [MetricSample(name, (), histogram.sample_values()) for name, histogram in self.requests.histograms()]
        rows += [
            MetricSample("vllm:request_success_total", (why,), each.sample_values())
            for why, each in self.requests.reasons()
        ]
        rows.append(MetricSample("quintet:requests_failed_total", (), self.requests.failed.sample_values()))
        calls = MetricSample("quintet:api_calls", (), [self.calls()])
        return [*rows, calls, MetricSample("quintet:open_connections", (), [self.connections()])]

    def _counter(self, name: str, *labels: str) -> CounterSeries:
        held = self._series.get((name, labels))
        if held is None:
            assert self._known[name].kind == "counter" and len(self._known[name].labels) == len(labels)
            held = self._series[name, labels] = CounterSeries()
        assert isinstance(held, CounterSeries)
        return held

    def _histogram(self, name: str, *labels: str) -> HistogramSeries:
        held = self._series.get((name, labels))
        if held is None:
            held = self._series[name, labels] = HistogramSeries(self._known[name].buckets)
        assert isinstance(held, HistogramSeries)
        return held
