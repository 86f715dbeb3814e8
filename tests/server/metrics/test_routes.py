"""GET /metrics of the real app: responses under their routes, refusals by their reason, nothing unbounded."""

from collections.abc import AsyncIterator

import httpx
import pytest

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import RequestCost
from tests.server.metrics.scrapes import TellingBackend, samples

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": "a", "max_tokens": 3}


@pytest.fixture
async def service() -> AppState:
    return AppState(TellingBackend(), ServerConfig(api_key=("secret",), max_body_bytes=1000, max_queued_requests=2))


@pytest.fixture
async def client(service: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY) as made:
        yield made


async def scraped(client: httpx.AsyncClient) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(response.text)


async def test_responses_are_counted_under_their_route(client: httpx.AsyncClient) -> None:
    for stream in (False, True, True):
        assert (await client.post("/v1/completions", json={**BODY, "stream": stream})).status_code == 200
    await client.get("/health")
    found = await scraped(client)
    assert found["quintet:http_requests_total{method=POST,route=/v1/completions,status=200}"] == 3
    assert found["quintet:http_requests_total{method=GET,route=/health,status=200}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}"] == 3
    found = await scraped(client)
    assert found["quintet:http_requests_total{method=GET,route=/metrics,status=200}"] == 1


async def test_the_names_of_vllms_http_metrics_show_the_same(client: httpx.AsyncClient) -> None:
    """By class of status; probes are in neither."""
    for stream in (False, True):
        assert (await client.post("/v1/completions", json={**BODY, "stream": stream})).status_code == 200
    assert (await client.post("/v1/completions", json={"prompt": 1.5})).status_code == 400
    for probe in ("/health", "/ready", "/metrics", "/version"):
        await client.get(probe)
    found = await scraped(client)
    assert found["http_requests_total{handler=/v1/completions,method=POST,status=2xx}"] == 2
    assert found["http_requests_total{handler=/v1/completions,method=POST,status=4xx}"] == 1
    lasted = "http_request_duration_seconds"
    assert found[f"{lasted}_count{{handler=/v1/completions,method=POST}}"] == 3
    assert found[f"{lasted}_sum{{handler=/v1/completions,method=POST}}"] > 0
    handlers = {name for name in found if name.startswith("http_request")}
    assert not [name for name in handlers if "completions" not in name]


async def test_paths_and_methods_that_nobody_knows_make_no_series(client: httpx.AsyncClient) -> None:
    for number in range(20):
        assert (await client.get(f"/secret/{number}")).status_code == 404
        await client.request(f"VERB{number}", "/health")
    found = await scraped(client)
    assert found["quintet:http_requests_total{method=GET,route=none,status=404}"] == 20
    assert not any("secret" in name or "VERB" in name for name in found)
    assert sum(name.startswith("quintet:http_requests_total") for name in found) < 5


async def test_refusals_are_counted_by_their_reason(client: httpx.AsyncClient, service: AppState) -> None:
    async def refused(**kwargs: object) -> int:
        return (await client.post("/v1/completions", **kwargs)).status_code  # type: ignore[arg-type]

    assert await refused(json=BODY, headers={"Authorization": "Bearer wrong"}) == 401
    assert await refused(json={**BODY, "prompt": "a" * 2000}) == 413
    assert await refused(json={**BODY, "max_tokens": -1}) == 400
    assert await refused(json={**BODY, "model": "other"}) == 404
    service.capacity.held = RequestCost(completions=2)
    assert await refused(json=BODY) == 429
    service.draining = True
    assert await refused(json=BODY) == 503
    assert (await client.get("/ready")).status_code == 503  # a probe is no refusal
    found = await scraped(client)
    for reason in ("unauthorized", "too_large", "invalid", "not_found", "overloaded", "unavailable"):
        assert found[f"quintet:requests_refused_total{{reason={reason}}}"] == 1, reason
    assert found["quintet:requests_aborted_total"] == 0


async def test_the_model_has_the_name_that_it_is_served_under() -> None:
    service = AppState(TellingBackend(), ServerConfig(served_model_name=("mine", "other")))
    transport = httpx.ASGITransport(make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        text = (await client.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="mine"} 3.0' in text.splitlines()


async def test_metrics_need_a_key_as_every_route(client: httpx.AsyncClient) -> None:
    assert (await client.get("/metrics", headers={"Authorization": "Bearer wrong"})).status_code == 401
