"""Builds a scrape: rows of all API processes and of the engine, in Prometheus' text format."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quintet.common.metric_types import MetricSample, sum_samples
from quintet.server.backend import EngineDead
from quintet.server.metrics.catalogue import ALL_METRICS, MetricInfo
from quintet.server.metrics.engine import engine_rows

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from quintet.server.http.app_state import AppState


# Never OpenMetrics: there prometheus_client replaces the colon in vLLM's names by _.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def scrape(service: "AppState") -> bytes:
    """Returns the metrics of the whole server, from any of its processes."""
    from prometheus_client import CollectorRegistry, generate_latest

    others, silent = await service.metrics.gather_others()
    served = sum_samples([*service.metrics.rows(), *others])
    rows = [*engine_rows(service.backend), *served, MetricSample("quintet:peers_silent", (), [silent])]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposition(rows, _model_name(service)))
    return generate_latest(registry)


def _model_name(service: "AppState") -> str | None:
    """Returns the served model's name; None until the engine has reported it."""
    try:
        return service.model_names[0]
    except EngineDead:
        return None


class Exposition:
    """Collector of prometheus_client over rows. Metrics of the model have no samples while its name is unknown."""

    def __init__(self, rows: Sequence[MetricSample], model: str | None) -> None:
        self._model = model
        self._rows: dict[str, list[MetricSample]] = {}
        for row in rows:
            self._rows.setdefault(row.name, []).append(row)

    def collect(self) -> Iterator["Family"]:
        """Yields metric families in the catalogue's order."""
        for metric in ALL_METRICS:
            rows = [] if metric.of_model and self._model is None else self._rows.get(metric.name, [])
            yield _family(metric, rows, self._model if metric.of_model else None)


def _family(metric: MetricInfo, rows: list[MetricSample], model: str | None) -> "Family":
    """Builds one family. `model`: value of model_name; the label engine follows it, as in vLLM."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    def labels(row: MetricSample) -> list[str]:
        return [*([] if model is None else [model, str(row.engine)]), *row.labels]

    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.all_labels)
        for row in rows:
            histogram.add_metric(labels(row), _cumulative(metric.buckets, row.values[:-1]), row.values[-1])
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.all_labels)
    for row in rows:
        family.add_metric(labels(row), row.values[0])
    return family


def _cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Returns cumulative buckets: in Prometheus each bucket includes all lower ones."""
    from prometheus_client.utils import floatToGoString

    total, buckets = 0.0, []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
