"""Metrics of a router: of each server, and of itself."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quintet.common.metric_types import HistogramSeries

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OVERHEAD = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0)
_FAILURES = ("unreached", "broken", "late", "refused", "mid_stream")


def _histogram() -> HistogramSeries:
    return HistogramSeries(SECONDS)


@dataclass
class BackendCounts:
    """Counters of one server."""

    statuses: dict[int, int] = field(default_factory=dict)  # of answers that were passed on
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FAILURES, 0))
    first_byte: HistogramSeries = field(default_factory=_histogram)
    total_time: HistogramSeries = field(default_factory=_histogram)

    def count_status(self, status: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def count_failure(self, kind: str) -> None:
        self.failures[kind] += 1


@dataclass
class RouterCounts:
    """Counters of the router."""

    retries: int = 0
    recomputed: int = 0  # requests with a prompt that the server of --decode had to compute
    cancelled: int = 0  # by their clients
    refused: dict[int, int] = field(default_factory=dict)  # by status: answers of our own
    overhead: HistogramSeries = field(default_factory=lambda: HistogramSeries(OVERHEAD))


@dataclass(frozen=True)
class RouterSnapshot:
    """State of the router at the moment of a scrape."""

    backends: Sequence[Any]  # Backend
    totals: RouterCounts
    in_flight: int
    waiting: int


def scrape(now: RouterSnapshot) -> bytes:
    """In Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(now))
    return generate_latest(registry)


class _RouterCollector:
    """A collector of prometheus_client."""

    def __init__(self, now: RouterSnapshot) -> None:
        self._now = now

    def collect(self) -> Iterator["Family"]:
        yield from self._backend_metrics()
        yield from self._router_metrics()

    def _backend_metrics(self) -> Iterator["Family"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["backend", "pool"]
        up = GaugeMetricFamily("quintet:router_backend_up", "1 for a server that takes requests.", labels=labels)
        busy = GaugeMetricFamily("quintet:router_backend_in_flight", "Requests that a server has.", labels=labels)
        answers = CounterMetricFamily(
            "quintet:router_requests_total", "Answers of servers that were passed on.", labels=[*labels, "status"]
        )
        failures = CounterMetricFamily(
            "quintet:router_failures_total", "Requests that a server did not answer: no connection (unreached), it "
            "ended (broken), nothing came in time (late), it was turned away (refused), or the answer broke off "
            "(mid_stream).", labels=[*labels, "kind"],
        )  # fmt: skip
        for each in self._now.backends:
            of = [each.url, each.pool.value]
            up.add_metric(of, float(each.up and not each.draining))
            busy.add_metric(of, each.in_flight)
            for status, number in each.counts.statuses.items():
                answers.add_metric([*of, str(status)], number)
            for kind, number in each.counts.failures.items():
                failures.add_metric([*of, kind], number)
        yield from (up, busy, answers, failures)
        for name, help, field_name in (
            ("first_byte", "From sending a request to its answer's head.", "first_byte"),
            ("request", "From sending a request to the end of its answer.", "total_time"),
        ):
            rows = [([each.url, each.pool.value], getattr(each.counts, field_name)) for each in self._now.backends]
            yield seconds_family(f"quintet:router_{name}_seconds", help, labels, rows)

    def _router_metrics(self) -> Iterator["Family"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now, totals = self._now, self._now.totals
        for name, help, number in (
            ("in_flight", "Requests that are under way.", now.in_flight),
            ("waiting", "Requests that wait for a place.", now.waiting),
        ):
            yield GaugeMetricFamily(f"quintet:router_{name}", help, value=number)
        for name, help, number in (
            ("retries", "Requests that were sent to another server.", totals.retries),
            ("recomputed", "Requests whose prompt had to be computed where they are answered.", totals.recomputed),
            ("cancelled", "Requests whose client has gone.", totals.cancelled),
        ):
            yield CounterMetricFamily(f"quintet:router_{name}_total", help, value=number)
        refused = CounterMetricFamily(
            "quintet:router_refused_total", "Requests that the router itself answered with an error.", labels=["status"]
        )
        for status, number in totals.refused.items():
            refused.add_metric([str(status)], number)
        yield refused
        help = "From a request's last byte to its first sending, without what it waited for a place."
        yield seconds_family("quintet:router_overhead_seconds", help, [], [([], totals.overhead)])


def seconds_family(
    name: str, help: str, labels: list[str], rows: Iterable[tuple[list[str], HistogramSeries]]
) -> "Family":
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    family = HistogramMetricFamily(name, help, labels=labels)
    for of, histogram in rows:
        total, buckets = 0, []
        for bound, number in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += number
            buckets.append((floatToGoString(bound), total))
        family.add_metric(of, buckets, histogram.sum)
    return family
