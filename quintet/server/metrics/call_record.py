"""Records the metrics of one API call: watches its requests from first output to end."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quintet.engine.observability.request_stats import RequestTimer
from quintet.outputs import RequestOutput
from quintet.server.metrics.api_metrics import ApiMetrics

if TYPE_CHECKING:
    from quintet.server.http.engine_call import PromptRequest
    from quintet.server.tracing import RequestSpan


class CallRecord:
    """Metrics of one accepted API call. take() runs for every streamed token, so it must be fast."""

    __slots__ = ("_metrics", "_span", "asks", "watches", "why")

    def __init__(self, metrics: ApiMetrics, asks: Sequence["PromptRequest"], span: "RequestSpan | None" = None) -> None:
        self._metrics, self.asks, self._span = metrics, list(asks), span
        self.watches = [RequestTimer(metrics.requests, ask.params) for ask in asks]
        self.why: Exception | None = None  # the reason if the call was stopped from outside

    def add(self, ask: "PromptRequest") -> None:
        """Adds another round of the call."""
        self.asks.append(ask)
        self.watches.append(RequestTimer(self._metrics.requests, ask.params))

    def record_output(self, number: int, output: RequestOutput) -> None:
        """Records an output of request `number` when the engine sends it."""
        self.watches[number].record(output)

    def abort(self, numbers: Iterable[int]) -> None:
        """Counts these requests as aborted."""
        for number in numbers:
            watch = self.watches[number]
            self._metrics.aborted.add()
            self._metrics.requests.count_ended("abort", watch.params.n - len(watch.reasons))

    def end(self) -> None:
        """Ends the record: the call is over, all of its requests have ended."""
        if self._span is not None:
            self._span.record_call(self)
