"""Metrics of a server of several models: of each model, of the memory plan, and those of the engines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.router.metrics import RouterCounts, seconds_family
from quintet.router.models.managed_model import ManagedModel
from quintet.router.models.planner import MemoryLedger, ModelState

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@dataclass(frozen=True)
class ModelsSnapshot:
    """State at the moment of a scrape."""

    models: Sequence[ManagedModel]
    ledger: MemoryLedger
    totals: RouterCounts
    in_flight: int
    engines: Mapping[str, str]  # by model: its engine's metrics, in Prometheus' text format


def scrape(now: ModelsSnapshot) -> bytes:
    """In Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ModelsCollector(now))
    return generate_latest(registry)


class _ModelsCollector:
    """A collector of prometheus_client."""

    def __init__(self, now: ModelsSnapshot) -> None:
        self._now = now

    def collect(self) -> Iterator["Family"]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._totals()
        yield from _merged(self._now.engines)

    def _gauges(self) -> Iterator["Family"]:
        from prometheus_client.core import GaugeMetricFamily

        now, labels = self._now, ["model"]
        state = GaugeMetricFamily(
            "quintet:model_state", "1 for the state that a model is in.", labels=["model", "state"]
        )
        for model in now.models:
            for each in ModelState:
                state.add_metric([model.name, each.value], float(model.slot.state is each))
        yield state
        for name, help, values in (
            ("in_flight", "Requests that a model's engine has.", [each.slot.in_flight for each in now.models]),
            ("waiting", "Requests that wait for a model to load.", [each.slot.waiting for each in now.models]),
            ("memory_planned_bytes", "Memory that is planned for a model now.",
             [each.slot.planned for each in now.models]),
        ):  # fmt: skip
            family = GaugeMetricFamily(f"quintet:model_{name}", help, labels=labels)
            for model, value in zip(now.models, values, strict=True):
                family.add_metric([model.name], value)
            yield family
        yield GaugeMetricFamily("quintet:models_memory_budget_bytes", "Memory of all models together, at most.",
                                value=now.ledger.budget)  # fmt: skip
        yield GaugeMetricFamily("quintet:models_memory_planned_bytes", "Memory that is planned for all models now.",
                                value=now.ledger.planned)  # fmt: skip
        yield GaugeMetricFamily("quintet:models_in_flight", "Requests that are under way or wait.", value=now.in_flight)

    def _counters(self) -> Iterator["Family"]:
        from prometheus_client.core import CounterMetricFamily

        models, labels = self._now.models, ["model"]
        for name, help in (
            ("loads", "Engines that were started and became ready."),
            ("load_failures", "Loads that failed."),
            ("sleeps", "Idle engines that were put to sleep."),
            ("wakes", "Engines that were woken by a request."),
        ):
            family = CounterMetricFamily(f"quintet:model_{name}_total", help, labels=labels)
            for each in models:
                family.add_metric([each.name], getattr(each.counts, name))
            yield family
        unloads = CounterMetricFamily(
            "quintet:model_unloads_total", "Engines that have ended: idle, to make room (memory), by an administrator "
            "(admin), or by themselves (exit).", labels=["model", "reason"],
        )  # fmt: skip
        answers = CounterMetricFamily(
            "quintet:model_requests_total", "Answers of engines that were passed on.", labels=["model", "status"]
        )
        for each in models:
            for reason, number in each.counts.unloads.items():
                unloads.add_metric([each.name, reason], number)
            for status, number in each.answers.statuses.items():
                answers.add_metric([each.name, str(status)], number)
        yield from (unloads, answers)
        yield seconds_family(
            "quintet:model_load_seconds", "From the start of a load to the first request that it can answer.", labels,
            [([each.name], each.counts.load_seconds) for each in models],
        )  # fmt: skip

    def _totals(self) -> Iterator["Family"]:
        from prometheus_client.core import CounterMetricFamily

        refused = CounterMetricFamily(
            "quintet:models_refused_total", "Requests that were answered with an error without an engine.",
            labels=["status"],
        )  # fmt: skip
        for status, number in self._now.totals.refused.items():
            refused.add_metric([str(status)], number)
        yield refused
        yield CounterMetricFamily("quintet:models_cancelled_total", "Requests whose client has gone.",
                                  value=self._now.totals.cancelled)  # fmt: skip


def _merged(engines: Mapping[str, str]) -> Iterator["Family"]:
    """Yields the engines' families, each once; samples without the label model_name get it, so that they differ."""
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Family] = {}
    for model, text in engines.items():
        for family in text_string_to_metric_families(text):
            family.samples = [
                sample._replace(labels={"model_name": model, **sample.labels}) for sample in family.samples
            ]
            if (known := families.get(family.name)) is None:
                families[family.name] = family
            else:
                known.samples += family.samples
    yield from families.values()
