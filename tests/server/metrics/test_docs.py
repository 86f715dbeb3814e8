"""docs/metrics.md lists what a scrape shows: the same names, types, labels and meanings, and nothing else."""

import re
from pathlib import Path

from quintet.server.config import ServerConfig
from quintet.server.http.app_state import AppState
from quintet.server.metrics.catalogue import ALL_METRICS
from quintet.server.metrics.prometheus import scrape
from tests.server.metrics.scrapes import TellingBackend

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"\| `((?:vllm:|quintet:|http_)\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]+) \|")


def test_the_table_is_the_catalogue() -> None:
    found = [(name, kind, labels, help) for name, kind, labels, help, _ in ROW.findall(PAGE)]
    assert found == [
        (each.name, each.kind, ", ".join(f"`{label}`" for label in each.all_labels) or "none", each.help)
        for each in ALL_METRICS
    ]


def test_each_row_says_whether_it_is_vllms() -> None:
    for name, *_, compared in ROW.findall(PAGE):
        assert (compared == "ours") == name.startswith("quintet:"), name


async def test_a_scrape_shows_the_catalogue() -> None:
    text = (await scrape(AppState(TellingBackend(), ServerConfig()))).decode()
    shown = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    assert shown == [(each.name, each.kind) for each in ALL_METRICS]
    helps = re.findall(r"^# HELP \S+ (.*)$", text, re.MULTILINE)
    assert helps == [each.help for each in ALL_METRICS]


async def test_every_metric_has_a_sample_once_the_model_is_there() -> None:
    service = AppState(TellingBackend(), ServerConfig())
    service.metrics.count_response("/", "GET", 200)
    service.metrics.record_duration("/", "GET", 0.5)
    text = (await scrape(service)).decode()
    sampled = re.findall(r"^((?:vllm:|quintet:|http_)\w+?)(?:_bucket|_sum|_count)?[{ ]", text, re.MULTILINE)
    assert set(sampled) == {each.name for each in ALL_METRICS}
