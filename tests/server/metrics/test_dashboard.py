"""docs/grafana.json: what Grafana takes for a dashboard, and nothing in it that a scrape does not show."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quintet.server.metrics.catalogue import ALL_METRICS, MetricInfo

FILE = Path(__file__).parents[3] / "docs" / "grafana.json"
_NAME = re.compile(r"(?:vllm|quintet):\w+")
_SELECTED = re.compile(r"((?:vllm|quintet):\w+)\{([^}]*)\}")
_SOURCE = {
    "type": "object", "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
}  # fmt: skip
_TARGET = {
    "type": "object", "required": ["refId", "expr", "legendFormat", "datasource"],
    "properties": {"expr": {"type": "string", "minLength": 1}, "datasource": _SOURCE},
}  # fmt: skip
_GRID = {
    "type": "object", "required": ["h", "w", "x", "y"], "additionalProperties": {"type": "integer", "minimum": 0},
}  # fmt: skip
_PANEL = {
    "type": "object", "required": ["id", "type", "title", "gridPos"],
    "properties": {"type": {"enum": ["row", "timeseries", "stat"]}, "gridPos": _GRID, "title": {"minLength": 1}},
    "if": {"properties": {"type": {"not": {"const": "row"}}}},
    "then": {
        "required": ["datasource", "targets", "fieldConfig", "options", "description"],
        "properties": {"datasource": _SOURCE, "targets": {"type": "array", "minItems": 1, "items": _TARGET}},
    },
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time", "refresh", "tags"],
    "properties": {
        "schemaVersion": {"type": "integer", "minimum": 36}, "panels": {"type": "array", "items": _PANEL},
        "id": {"type": "null"},  # Grafana's own number: one that is taken along names somebody's dashboard
        "templating": {"type": "object", "required": ["list"], "properties": {"list": {"items": {
            "required": ["name", "type", "query"], "properties": {"type": {"enum": ["datasource", "query"]}},
        }}}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def queries(board: dict[str, Any]) -> list[str]:
    """All that Prometheus is asked."""
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return asked + [each["definition"] for each in board["templating"]["list"] if each["type"] == "query"]


def shown(metric: MetricInfo) -> set[str]:
    """The names of its samples."""
    return {metric.name + end for end in ("_bucket", "_sum", "_count")} if metric.kind == "histogram" else {metric.name}


def test_it_is_what_grafana_takes_for_a_dashboard(board: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(board)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        names = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(names)) == len(names), panel["title"]


def test_no_panel_lies_on_another(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    for each in places:
        assert each["x"] + each["w"] <= 24
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_every_name_and_label_is_one_of_a_scrape(board: dict[str, Any]) -> None:
    known = {name: metric for metric in ALL_METRICS for name in shown(metric)}
    for query in queries(board):
        names = _NAME.findall(query)
        assert names and set(names) <= known.keys(), query
        allowed = {label for name in names for label in known[name].all_labels} | {"le", "instance"}
        used = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
        used |= {label for _, chosen in _SELECTED.findall(query) for label in re.findall(r"(\w+)=~?", chosen)}
        assert used <= allowed, query


def test_the_variables_choose_everywhere(board: dict[str, Any]) -> None:
    known = {name: metric for metric in ALL_METRICS for name in shown(metric)}
    names = [each["name"] for each in board["templating"]["list"]]
    assert names == ["datasource", "model_name", "instance"]
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            selected = _SELECTED.findall(target["expr"])
            assert len(selected) == len(_NAME.findall(target["expr"])), target["expr"]
            for name, chosen in selected:
                assert 'instance=~"$instance"' in chosen
                assert ('model_name=~"$model_name"' in chosen) == known[name].of_model, target["expr"]


def test_brackets_are_closed(board: dict[str, Any]) -> None:
    for query in queries(board):
        for pair in ("()", "{}", "[]"):
            assert query.count(pair[0]) == query.count(pair[1]), query


@pytest.mark.parametrize(
    "name",
    [
        "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
        "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
        "vllm:spec_decode_num_accepted_tokens_total", "vllm:request_success_total", "quintet:http_requests_total",
    ],
)  # fmt: skip
def test_it_has_a_panel_for_what_people_look_at(board: dict[str, Any], name: str) -> None:
    assert any(name in query for query in queries(board))
