"""The counts of one API process."""

from collections.abc import Awaitable, Callable

from quintet.server.metrics.catalogue import SERVED
from quintet.server.metrics.series import Counter, Histogram, Row

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
_PROBES = {"/health", "/ready", "/ping", "/metrics"}
_UNCOUNTED = _PROBES | {"/version", "/load"}  # in what has the names of vLLM's HTTP metrics


async def _no_others() -> tuple[list[Row], int]:
    return [], 0


class Metrics:
    """Used in one event loop. Histograms and counters of the hot path are attributes."""

    def __init__(self) -> None:
        self._known = {metric.name: metric for metric in SERVED}
        self._series: dict[tuple[str, tuple[str, ...]], Counter | Histogram] = {}
        self.connections: Callable[[], int] = int  # how many are open
        self.calls: Callable[[], int] = int  # how many are under way
        self.others: Callable[[], Awaitable[tuple[list[Row], int]]] = (
            _no_others  # the rows of the other API processes, and how many of those are silent
        )
        self.first_token = self._histogram("vllm:time_to_first_token_seconds")
        self.between_tokens = self._histogram("vllm:inter_token_latency_seconds")
        self.token_time = self._histogram("vllm:request_time_per_output_token_seconds")
        self.latency = self._histogram("vllm:e2e_request_latency_seconds")
        self.queue = self._histogram("vllm:request_queue_time_seconds")
        self.prefill = self._histogram("vllm:request_prefill_time_seconds")
        self.decode = self._histogram("vllm:request_decode_time_seconds")
        self.inference = self._histogram("vllm:request_inference_time_seconds")
        self.prompt_tokens = self._histogram("vllm:request_prompt_tokens")
        self.computed_tokens = self._histogram("vllm:request_prefill_kv_computed_tokens")
        self.generation_tokens = self._histogram("vllm:request_generation_tokens")
        self.longest = self._histogram("vllm:request_max_num_generation_tokens")
        self.params_n = self._histogram("vllm:request_params_n")
        self.params_max_tokens = self._histogram("vllm:request_params_max_tokens")
        self.aborted = self._counter("quintet:requests_aborted_total")
        self.failed = self._counter("quintet:requests_failed_total")
        for reason in ("stop", "length", "repetition", "abort", "error"):
            self._counter("vllm:request_success_total", reason)
        for reason in sorted(set(_REFUSALS.values())):
            self._counter("quintet:requests_refused_total", reason)

    def ended(self, reason: str, count: int = 1) -> None:
        """So many completions; vLLM's name for it counts failures, too."""
        self._counter("vllm:request_success_total", reason).add(count)

    def responded(self, route: str, method: str, status: int) -> None:
        """A response was begun. The route is a template, so that there are few."""
        self._counter("quintet:http_requests_total", route, method, str(status)).add()
        if status in _REFUSALS and route not in _PROBES and method != "HEAD":
            self._counter("quintet:requests_refused_total", _REFUSALS[status]).add()
        if route not in _UNCOUNTED:
            self._counter("http_requests_total", route, method, f"{status // 100}xx").add()

    def lasted(self, route: str, method: str, seconds: float) -> None:
        """A response went out, or broke off."""
        if route not in _UNCOUNTED:
            self._histogram("http_request_duration_seconds", route, method).observe(seconds)

    def rows(self) -> list[Row]:
        """All series as they stand."""
        rows = [Row(name, labels, series.values()) for (name, labels), series in self._series.items()]
        calls = Row("quintet:api_calls", (), [self.calls()])
        return [*rows, calls, Row("quintet:open_connections", (), [self.connections()])]

    def _counter(self, name: str, *labels: str) -> Counter:
        held = self._series.get((name, labels))
        if held is None:
            assert self._known[name].kind == "counter" and len(self._known[name].labels) == len(labels)
            held = self._series[name, labels] = Counter()
        assert isinstance(held, Counter)
        return held

    def _histogram(self, name: str, *labels: str) -> Histogram:
        held = self._series.get((name, labels))
        if held is None:
            held = self._series[name, labels] = Histogram(self._known[name].buckets)
        assert isinstance(held, Histogram)
        return held
