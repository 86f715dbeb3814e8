"""What one API call adds to the metrics: its requests are watched from their first output to their end."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quintet.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.metrics.metrics import Metrics

if TYPE_CHECKING:
    from quintet.server.http.calls import Ask
    from quintet.server.tracing import RequestSpan

ERROR = "error"  # finish_reason of a completion that failed


class Record:
    """One for each call that was let in. take() runs for every token that is streamed, so it does little."""

    __slots__ = ("_metrics", "_span", "asks", "watches", "why")

    def __init__(self, metrics: Metrics, asks: Sequence["Ask"], span: "RequestSpan | None" = None) -> None:
        self._metrics, self.asks, self._span = metrics, asks, span
        self.watches = [Watch(metrics, ask.params) for ask in asks]
        self.why: Exception | None = None  # the call was stopped from outside

    def add(self, ask: "Ask") -> None:
        """A further round of the call."""
        self.asks = [*self.asks, ask]
        self.watches.append(Watch(self._metrics, ask.params))

    def take(self, number: int, output: RequestOutput) -> None:
        """An output of ask `number`, when it comes from the engine."""
        self.watches[number].take(output)

    def abort(self, numbers: Iterable[int]) -> None:
        """The requests of these asks are ended early."""
        for number in numbers:
            watch = self.watches[number]
            self._metrics.aborted.add()
            self._metrics.ended("abort", watch.params.n - len(watch.reasons))

    def end(self) -> None:
        """The call is over, all of its requests have ended."""
        if self._span is not None:
            self._span.answered(self)


class Watch:
    """One request. With outputs of deltas each token is timed; of a last output the mean is known."""

    __slots__ = ("_by_token", "_gaps", "_last", "_metrics", "counts", "params", "reasons", "times")

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics, self._gaps, self.params = metrics, metrics.between_tokens, params
        self._by_token = params.output_kind is RequestOutputKind.DELTA
        self._last = [0.0] * params.n  # when each completion got its latest token
        self.counts = [0] * params.n  # tokens of each completion
        self.reasons: list[str] = []  # finish_reasons, in the order of the ends
        self.times: RequestMetrics | None = None

    def take(self, output: RequestOutput) -> None:
        if self._by_token:
            if self.times is None and output.metrics.time_to_first_token is not None:
                self._metrics.first_token.observe(output.metrics.time_to_first_token)
                self.times = output.metrics
            now = output.metrics.last_token_time or 0.0
            for each in output.outputs:
                new, index = len(each.token_ids), each.index
                if new:
                    last = self._last[index]
                    if last:
                        self._gaps.observe((now - last) / new, new)
                    self._last[index] = now
                    self.counts[index] += new
                if each.finish_reason is not None:
                    self.reasons.append(each.finish_reason)
        elif output.finished:
            self._take_whole(output.outputs, output.metrics)
        if output.finished:
            self._finish(output)

    def _take_whole(self, completions: Sequence[CompletionOutput], times: RequestMetrics) -> None:
        """All tokens at once. The longest completion ran from the first token to the last."""
        if times.time_to_first_token is not None:
            self._metrics.first_token.observe(times.time_to_first_token)
        for each in completions:
            self.counts[each.index] = len(each.token_ids)
            self.reasons.append(each.finish_reason or "")
        gap = _mean_gap(times, max(self.counts))
        if gap is not None:
            self._gaps.observe(gap, sum(count - 1 for count in self.counts if count))

    def _finish(self, output: RequestOutput) -> None:
        metrics, self.times = self._metrics, output.metrics
        for reason, count in zip(self.reasons, self.counts, strict=True):
            metrics.ended(reason)
            if reason != ERROR:
                metrics.generation_tokens.observe(count)
        if ERROR in self.reasons:
            metrics.failed.add()
            return
        self._observe_times(output.metrics)
        metrics.prompt_tokens.observe(output.metrics.num_prompt_tokens)
        metrics.computed_tokens.observe(output.metrics.num_prompt_tokens - output.metrics.num_cached_tokens)
        metrics.longest.observe(max(self.counts))
        metrics.params_n.observe(self.params.n)
        if self.params.max_tokens is not None:
            metrics.params_max_tokens.observe(self.params.max_tokens)
        gap = _mean_gap(output.metrics, max(self.counts))
        if gap is not None:
            metrics.token_time.observe(gap)

    def _observe_times(self, times: RequestMetrics) -> None:
        """How long it took as a whole, and its phases."""
        metrics = self._metrics
        metrics.latency.observe(times.latency or 0.0)
        for histogram, seconds in (
            (metrics.queue, times.time_in_queue),
            (metrics.prefill, times.prefill_time),
            (metrics.decode, times.decode_time),
            (metrics.inference, times.inference_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)


def _mean_gap(times: RequestMetrics, count: int) -> float | None:
    """Seconds between two tokens of the longest completion, which has `count`."""
    if count < 2 or times.first_token_time is None or times.last_token_time is None:
        return None
    return (times.last_token_time - times.first_token_time) / (count - 1)
