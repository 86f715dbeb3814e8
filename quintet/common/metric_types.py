"""Counters and histograms of one event loop: plain numbers without locks, that processes add up."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec


class MetricSample(msgspec.Struct, array_like=True):
    """One series at one moment. Rows of the same name and labels add up, value by value."""

    name: str
    labels: tuple[str, ...]  # values, in the order of the catalogue
    values: list[float]  # of a histogram: its buckets, each without those below, the last without end; then the sum
    engine: int = 0  # that it is of; of requests, all are counted together


class CounterSeries:
    """Grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, number: float = 1) -> None:
        self.value += number

    def sample_values(self) -> list[float]:
        return [self.value]


class HistogramSeries:
    """Counts of values between two bounds; a bound belongs to the bucket below it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def sample_values(self) -> list[float]:
        return [*self.counts, self.sum]


def sum_samples(rows: Iterable[MetricSample]) -> list[MetricSample]:
    """One row for each name and labels, in the order in which they came first."""
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for row in rows:
        held = sums.setdefault((row.name, row.labels), [0.0] * len(row.values))
        held[:] = map(float.__add__, held, map(float, row.values))
    return [MetricSample(name, labels, values) for (name, labels), values in sums.items()]
