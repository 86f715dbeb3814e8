"""What one API call adds to the metrics: its requests are watched from their first output to their end."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quintet.engine.request_counts import Watch
from quintet.outputs import RequestOutput
from quintet.server.metrics.metrics import Metrics

if TYPE_CHECKING:
    from quintet.server.http.calls import Ask
    from quintet.server.tracing import RequestSpan


class Record:
    """One for each call that was let in. take() runs for every token that is streamed, so it does little."""

    __slots__ = ("_metrics", "_span", "asks", "watches", "why")

    def __init__(self, metrics: Metrics, asks: Sequence["Ask"], span: "RequestSpan | None" = None) -> None:
        self._metrics, self.asks, self._span = metrics, asks, span
        self.watches = [Watch(metrics.requests, ask.params) for ask in asks]
        self.why: Exception | None = None  # the call was stopped from outside

    def add(self, ask: "Ask") -> None:
        """A further round of the call."""
        self.asks = [*self.asks, ask]
        self.watches.append(Watch(self._metrics.requests, ask.params))

    def take(self, number: int, output: RequestOutput) -> None:
        """An output of ask `number`, when it comes from the engine."""
        self.watches[number].take(output)

    def abort(self, numbers: Iterable[int]) -> None:
        """The requests of these asks are ended early."""
        for number in numbers:
            watch = self.watches[number]
            self._metrics.aborted.add()
            self._metrics.requests.ended("abort", watch.params.n - len(watch.reasons))

    def end(self) -> None:
        """The call is over, all of its requests have ended."""
        if self._span is not None:
            self._span.answered(self)
