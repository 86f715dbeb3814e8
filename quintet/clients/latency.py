"""Times of each streamed answer in a load test, and the figures of all of them."""

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.clients import errors
from quintet.clients.http_client import EventStreamParser

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, per token after it",
    "itl": "ITL, between chunks",
    "e2el": "E2E, to the last token",
}


def percentiles(values: Sequence[float], shares: Sequence[int] = (10, 50, 90, 99)) -> dict[str, float]:
    """Mean and nearest-rank percentiles."""
    ranked = sorted(values)
    at = {f"p{share}": ranked[max(0, -(-share * len(ranked) // 100) - 1)] for share in shares}
    return {"mean": sum(ranked) / len(ranked), **at}


class StreamTimes:
    """One answer as it arrives: a time for each chunk that holds tokens; JSON is read only where it tells more."""

    def __init__(self, where: str) -> None:
        self.times = array("d")  # time.perf_counter() of each chunk of output
        self.usage: Mapping[str, Any] = {}
        self.is_complete = False  # a reason to finish, or [DONE], came
        self._where = where
        self._now = 0.0
        self._events = EventStreamParser(self._event)

    def feed(self, piece: bytes, now: float) -> None:
        """Sink of an HttpClient. Raises ServerError for what is no chunk, and for errors in chunks."""
        self._now = now
        self._events.feed(piece)

    def finish(self) -> None:
        """The body is whole: the answer must be too."""
        self._events.finish()
        if not self.is_complete:
            raise errors.connection_broken(self._where, ConnectionError("the stream ended early"))
        if not self.times:
            raise errors.ServerError("no output", f"{self._where} ended the answer without a token")

    def _event(self, data: bytes) -> None:
        plain = b'"finish_reason":null' in data or b'"finish_reason": null' in data
        if plain and self.times and b'"usage":{' not in data and b'"usage": {' not in data:
            self.times.append(self._now)
        elif data == b"[DONE]":
            self.is_complete = True
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        try:
            event = json.loads(data)
            error, usage, choices = event.get("error"), event.get("usage"), event.get("choices")
            if usage:
                self.usage = {**usage}
            for choice in choices or ():
                reason = choice.get("finish_reason")
                if _holds_output(choice, reason) or (reason is not None and not self.times):
                    self.times.append(self._now)  # an answer without a letter is timed by its end
                self.is_complete = self.is_complete or reason is not None
        except (ValueError, RecursionError, TypeError, AttributeError):
            raise errors.incompatible_server(self._where, "an event of its stream is no chunk of an answer") from None
        if error:
            raise errors.stream_error(self._where, event)


def _holds_output(choice: Mapping[str, Any], reason: str | None) -> bool:
    """A role alone and a reason alone are no output; an empty text may be a token without a letter of its own."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or reason is None
    has_output = any(value for name, value in delta.items() if name != "role")
    return has_output or (reason is None and "role" not in delta)


@dataclass
class RequestOutcome:
    """One request of a load test. Times are in seconds of time.perf_counter()."""

    started: float
    times: Sequence[float] = ()  # of the chunks of output
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_source: str = "usage"  # who counted the tokens: the server (usage), or we its chunks
    failure: errors.ServerError | None = None

    @classmethod
    def from_stream(cls, started: float, stream: StreamTimes, prompt_len: int | None) -> "RequestOutcome":
        """An answer that is whole; where the server counts nothing, its chunks and our prompt's length."""
        prompt, output = stream.usage.get("prompt_tokens"), stream.usage.get("completion_tokens")
        counted = isinstance(prompt, int) and isinstance(output, int)
        return cls(
            started,
            stream.times,
            prompt if isinstance(prompt, int) else prompt_len or 0,
            output if isinstance(output, int) else len(stream.times),
            "usage" if counted else "chunks",
        )

    def seconds(self, metric: str) -> float | None:
        """ttft, tpot or e2el; None where there is no such time."""
        first, last = self.times[0], self.times[-1]
        if metric == "tpot":
            return (last - first) / (self.output_tokens - 1) if self.output_tokens > 1 else None
        return (first if metric == "ttft" else last) - self.started

    def meets_goals(self, limits: Mapping[str, float]) -> bool:
        """True if it did not fail and each metric stays within its limit, in seconds."""
        return self.failure is None and all((self.seconds(name) or 0.0) <= limit for name, limit in limits.items())


@dataclass
class LoadResult:
    """All that a load test saw."""

    outcomes: Sequence[RequestOutcome]
    seconds: float  # from the first request to the end of the last answer
    client_seconds: float  # of processor time that the client itself took

    def figures(self, goodput: Mapping[str, float]) -> dict[str, Any]:
        """Under the names of vLLM's benchmark where the meaning is the same; times in milliseconds.

        `goodput` holds limits in seconds by metric: ttft, tpot, e2el.
        """
        whole = [each for each in self.outcomes if each.failure is None]
        failed = [each.failure for each in self.outcomes if each.failure is not None]
        prompt, output = sum(each.prompt_tokens for each in whole), sum(each.output_tokens for each in whole)
        chunks = sum(len(each.times) for each in self.outcomes)
        figures: dict[str, Any] = {
            "duration": self.seconds,
            "num_prompts": len(self.outcomes),
            "completed": len(whole),
            "failed": len(failed),
            "total_input_tokens": prompt,
            "total_output_tokens": output,
            "token_counts": dict(Counter(each.token_source for each in whole)),
            "request_throughput": len(whole) / self.seconds,
            "output_throughput": output / self.seconds,
            "total_token_throughput": (prompt + output) / self.seconds,
            "chunks": chunks,
            "client_cpu_us_per_chunk": self.client_seconds / chunks * 1e6 if chunks else None,
            "client_cpu_share": self.client_seconds / self.seconds,
        }
        if goodput:
            figures["goodput_slo_ms"] = {name: limit * 1e3 for name, limit in goodput.items()}
            figures["request_goodput"] = sum(each.meets_goals(goodput) for each in whole) / self.seconds
        for metric in METRICS:
            figures |= _metric_figures(metric, whole)
        return {**figures, "failures": dict(Counter(each.kind for each in failed))}


def _metric_figures(metric: str, whole: Sequence[RequestOutcome]) -> dict[str, float]:
    values = _gaps(whole) if metric == "itl" else [each.seconds(metric) for each in whole]
    known = [value * 1e3 for value in values if value is not None]
    if not known:
        return {}
    found = percentiles(known, PERCENTILES)
    return {f"{'median' if share == 'p50' else share}_{metric}_ms": value for share, value in found.items()}


def _gaps(whole: Sequence[RequestOutcome]) -> Sequence[float]:
    gaps = array("d")
    for each in whole:
        times = each.times
        gaps.extend(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return gaps
