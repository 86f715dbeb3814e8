"""How busy the server is, as those who balance load ask for it: GET /load, and a header beside each answer."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quintet.common.metric_types import MetricSample
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST, chat, client
from tests.server.metrics.scrapes import STATS, TellingBackend

ASK, TOLD = "endpoint-load-metrics-format", "endpoint-load-metrics"
BODY = {"prompt": "a", "max_tokens": 2}


async def test_without_the_flag_load_is_not_there_and_says_how() -> None:
    async with client() as http:
        response = await http.get("/load")
    assert response.status_code == 404 and "--enable-server-load-tracking" in response.text


async def test_load_is_the_calls_that_are_under_way() -> None:
    backend = FakeBackend(hang=1)
    async with client(backend, enable_server_load_tracking=True) as http:
        assert (await http.get("/load")).json() == {"server_load": 0}
        asked = [asyncio.ensure_future(http.post("/v1/completions", json={**BODY, "n": 3})) for _ in range(2)]
        while backend.hanging < 2:
            await asyncio.sleep(0)
        assert (await http.get("/load")).json() == {"server_load": 2}
        backend.go_on.set()
        await asyncio.gather(*asked)
        assert (await http.get("/load")).json() == {"server_load": 0}


async def test_load_is_of_all_processes() -> None:
    service = AppState(FakeBackend(), ServerConfig(enable_server_load_tracking=True))

    async def others() -> tuple[list[MetricSample], int]:
        return [
            MetricSample("quintet:api_calls", (), [3.0]),
            MetricSample("quintet:open_connections", (), [9.0]),
        ] * 2, 0

    service.metrics.gather_others = others
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url=HOST) as http:
        assert (await http.get("/load")).json() == {"server_load": 6}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_brings_the_load_in_the_form_that_was_asked_for(path: str, stream: bool) -> None:
    body: dict[str, Any] = {**(BODY if path == "/v1/completions" else chat(max_tokens=2)), "stream": stream}
    async with client(TellingBackend()) as http:
        for form in ("TEXT", "text"):
            text = await http.post(path, json=body, headers={ASK: form})
            assert text.headers[TOLD] == (
                "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0"
            )
        form, _, report = (await http.post(path, json=body, headers={ASK: "JSON"})).headers[TOLD].partition(" ")
    assert form == "JSON"
    assert json.loads(report) == {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0}}


@pytest.mark.parametrize("form", ["BIN", "", "nonsense", None])
async def test_other_forms_and_those_who_do_not_ask_get_none(form: str | None) -> None:
    async with client(TellingBackend()) as http:
        headers = {} if form is None else {ASK: form}
        response = await http.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 200 and TOLD not in response.headers


async def test_who_is_not_let_in_learns_nothing() -> None:
    async with client(TellingBackend(), api_key=("secret",)) as http:
        response = await http.post("/v1/completions", json=BODY, headers={ASK: "TEXT"})
    assert response.status_code == 401 and TOLD not in response.headers


async def test_an_engine_that_has_told_nothing_is_not_reported() -> None:
    backend = TellingBackend()
    backend.stats = lambda: None  # type: ignore[method-assign,assignment]
    async with client(backend) as http:
        assert TOLD not in (await http.post("/tokenize", json={"prompt": "a"}, headers={ASK: "TEXT"})).headers
        assert TOLD not in (await http.post("/v1/completions", json=BODY, headers={ASK: "TEXT"})).headers


async def test_the_report_is_of_the_moment() -> None:
    backend = TellingBackend()
    async with client(backend) as http:
        backend.told = replace(STATS, scheduler=replace(STATS.scheduler, num_waiting=7))
        response = await http.post("/v1/completions", json=BODY, headers={ASK: "TEXT"})
    assert "num_requests_waiting=7.0" in response.headers[TOLD]
