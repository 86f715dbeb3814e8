"""Statistics of requests, counted when they end, and per token if they stream. For one thread or event loop."""

from collections.abc import Iterator, Sequence

from quintet.common.metric_types import CounterSeries, HistogramSeries
from quintet.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams

ERROR = "error"  # finish_reason of a completion that failed
REASONS = ("stop", "length", "repetition", "abort", ERROR)
# The bounds of vLLM's histograms, and finer ones below, for small models answer faster than those begin.
_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
LATENCY = (0.01, 0.025, 0.05, 0.1, 0.2, *_SECONDS)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, *_TOKEN_SECONDS)
TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5)) + (1e6,)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)


class RequestStats:
    """Histograms of all requests that ended."""

    def __init__(self) -> None:
        self.first_token = HistogramSeries(FIRST_TOKEN)
        self.between_tokens = HistogramSeries(BETWEEN_TOKENS)
        self.token_time = HistogramSeries(BETWEEN_TOKENS)
        self.latency = HistogramSeries(LATENCY)
        self.queue = HistogramSeries(LATENCY)
        self.prefill = HistogramSeries(LATENCY)
        self.decode = HistogramSeries(LATENCY)
        self.inference = HistogramSeries(LATENCY)
        self.prompt_tokens = HistogramSeries(TOKENS)
        self.computed_tokens = HistogramSeries(TOKENS)
        self.generation_tokens = HistogramSeries(TOKENS)
        self.max_tokens_generated = HistogramSeries(TOKENS)
        self.preemptions = HistogramSeries(PREEMPTIONS)
        self.params_n = HistogramSeries(COMPLETIONS)
        self.params_max_tokens = HistogramSeries(TOKENS)
        self.failed = CounterSeries()
        self._ended = {reason: CounterSeries() for reason in REASONS}

    def count_ended(self, reason: str, count: int = 1) -> None:
        """Counts ended completions; vLLM's metric counts failures, too."""
        self._ended.setdefault(reason, CounterSeries()).add(count)

    def reasons(self) -> Iterator[tuple[str, CounterSeries]]:
        """Yields the reasons that completions ended for, and their counts."""
        yield from self._ended.items()

    def histograms(self) -> Iterator[tuple[str, HistogramSeries]]:
        """Yields the histograms with vLLM's names."""
        yield "vllm:time_to_first_token_seconds", self.first_token
        yield "vllm:inter_token_latency_seconds", self.between_tokens
        yield "vllm:request_time_per_output_token_seconds", self.token_time
        yield "vllm:e2e_request_latency_seconds", self.latency
        yield "vllm:request_queue_time_seconds", self.queue
        yield "vllm:request_prefill_time_seconds", self.prefill
        yield "vllm:request_decode_time_seconds", self.decode
        yield "vllm:request_inference_time_seconds", self.inference
        yield "vllm:request_prompt_tokens", self.prompt_tokens
        yield "vllm:request_prefill_kv_computed_tokens", self.computed_tokens
        yield "vllm:request_generation_tokens", self.generation_tokens
        yield "vllm:request_max_num_generation_tokens", self.max_tokens_generated
        yield "vllm:request_num_preemptions", self.preemptions
        yield "vllm:request_params_n", self.params_n
        yield "vllm:request_params_max_tokens", self.params_max_tokens


class RequestTimer:
    """One request. With outputs of deltas each token is timed; of a last output the mean is known."""

    __slots__ = ("_by_token", "_gaps", "_last", "_of_all", "counts", "params", "reasons", "times")

    def __init__(self, counts: RequestStats, params: SamplingParams) -> None:
        self._of_all, self._gaps, self.params = counts, counts.between_tokens, params
        self._by_token = params.output_kind is RequestOutputKind.DELTA
        self._last = [0.0] * params.n  # when each completion got its latest token
        self.counts = [0] * params.n  # tokens of each completion
        self.reasons: list[str] = []  # finish_reasons, in the order of the ends
        self.times: RequestMetrics | None = None

    def record(self, output: RequestOutput) -> None:
        if self._by_token:
            if self.times is None and output.metrics.time_to_first_token is not None:
                self._of_all.first_token.observe(output.metrics.time_to_first_token)
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
            self._record_whole(output.outputs, output.metrics)
        if output.finished:
            self._finish(output)

    def _record_whole(self, completions: Sequence[CompletionOutput], times: RequestMetrics) -> None:
        """All tokens at once. The longest completion ran from the first token to the last."""
        if times.time_to_first_token is not None:
            self._of_all.first_token.observe(times.time_to_first_token)
        for each in completions:
            self.counts[each.index] = len(each.token_ids)
            self.reasons.append(each.finish_reason or "")
        gap = _mean_gap(times, max(self.counts))
        if gap is not None:
            self._gaps.observe(gap, sum(count - 1 for count in self.counts if count))

    def _finish(self, output: RequestOutput) -> None:
        seen, self.times = self._of_all, output.metrics
        for reason, count in zip(self.reasons, self.counts, strict=True):
            seen.count_ended(reason)
            if reason != ERROR:
                seen.generation_tokens.observe(count)
        if ERROR in self.reasons:
            seen.failed.add()
            return
        self._observe_times(output.metrics)
        seen.prompt_tokens.observe(output.metrics.num_prompt_tokens)
        seen.computed_tokens.observe(output.metrics.num_prompt_tokens - output.metrics.num_cached_tokens)
        seen.max_tokens_generated.observe(max(self.counts))
        seen.preemptions.observe(output.metrics.num_preemptions)
        seen.params_n.observe(self.params.n)
        if self.params.max_tokens is not None:
            seen.params_max_tokens.observe(self.params.max_tokens)
        gap = _mean_gap(output.metrics, max(self.counts))
        if gap is not None:
            seen.token_time.observe(gap)

    def _observe_times(self, times: RequestMetrics) -> None:
        """Observes the latency of a request, and the times of its phases."""
        seen = self._of_all
        seen.latency.observe(times.latency or 0.0)
        for histogram, seconds in (
            (seen.queue, times.time_in_queue),
            (seen.prefill, times.prefill_time),
            (seen.decode, times.decode_time),
            (seen.inference, times.inference_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)


def _mean_gap(times: RequestMetrics, count: int) -> float | None:
    """Seconds between two tokens of the longest completion, which has `count`."""
    if count < 2 or times.first_token_time is None or times.last_token_time is None:
        return None
    return (times.last_token_time - times.first_token_time) / (count - 1)
