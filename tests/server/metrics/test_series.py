"""Our counters and histograms are those of Prometheus' own client, and add up."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from quintet.common.metric_types import MetricSample, sum_samples
from quintet.server.metrics import catalogue
from quintet.server.metrics import prometheus as exposition
from quintet.server.metrics.api_metrics import ApiMetrics
from tests.server.metrics.scrapes import samples

NAMES = {metric.name: metric for metric in catalogue.ALL_METRICS}


def shown(rows: list[MetricSample], model: str | None = "m") -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(exposition.Exposition(rows, model))
    return generate_latest(registry).decode()


def test_a_histogram_is_what_the_official_client_makes_of_the_same_values() -> None:
    name = "vllm:time_to_first_token_seconds"
    draw = random.Random(0)
    values = [draw.expovariate(3) for _ in range(500)] + [0.0, 0.001, 0.25, 2560.0, 5000.0]  # bounds among them
    official = CollectorRegistry()
    theirs = Histogram(name, "h", ["model_name"], registry=official, buckets=NAMES[name].buckets).labels("m")
    metrics = ApiMetrics()
    for value in values:
        theirs.observe(value)
        metrics.requests.first_token.observe(value)
    expected = {k: v for k, v in samples(generate_latest(official).decode()).items() if "_created" not in k}
    found = {k: v for k, v in samples(shown(metrics.rows())).items() if k.startswith(name)}
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) < 1e-6 for key in found)


def test_many_at_once_are_as_many_one_by_one() -> None:
    one, many = ApiMetrics().requests.latency, ApiMetrics().requests.latency
    for _ in range(7):
        one.observe(0.5)
    many.observe(0.5, 7)
    assert one.sample_values() == many.sample_values()


def test_labels_are_escaped_as_the_official_client_does() -> None:
    metrics, official = ApiMetrics(), CollectorRegistry()
    metrics.count_response('/a"b\\c\nd', "GET", 200)
    Counter("quintet:http_requests", "x", ["route", "method", "status"], registry=official).labels(
        '/a"b\\c\nd', "GET", "200"
    ).inc()
    (expected,) = (line for line in generate_latest(official).decode().splitlines() if "_total{" in line)
    assert expected in shown(metrics.rows()).splitlines()


def test_rows_of_processes_add_up_by_name_and_labels() -> None:
    first, second = ApiMetrics(), ApiMetrics()
    first.requests.count_ended("stop")
    first.requests.count_ended("length")
    second.requests.count_ended("stop")
    first.requests.latency.observe(0.4)
    second.requests.latency.observe(0.4)
    second.requests.latency.observe(70)
    first.connections = second.connections = lambda: 2
    found = samples(shown(sum_samples([*first.rows(), *second.rows()])))
    assert found["vllm:request_success_total{finished_reason=stop}"] == 2
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:e2e_request_latency_seconds_bucket{le=0.5}"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(70.8)
    assert found["quintet:open_connections"] == 4


def test_without_a_model_only_metrics_of_no_model_have_samples() -> None:
    metrics = ApiMetrics()
    metrics.requests.count_ended("stop")
    metrics.count_response("/health", "GET", 200)
    found = samples(shown(metrics.rows(), model=None))
    assert found["quintet:http_requests_total{method=GET,route=/health,status=200}"] == 1
    assert not any(name.startswith("vllm:") for name in found)
