"""Paths as clients write them: a slash at the end is the same place; what is nowhere is answered with where to look."""

from typing import Any

import httpx
import openai
import pytest

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import HOST, WAIT, chat, client, serving

BODY = {"prompt": "Once upon", "max_tokens": 2}


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/metrics", "/version", f"/v1/models/{MODEL}"])
async def test_a_slash_at_the_end_is_the_same_place(path: str) -> None:
    async with client() as http:
        plain, slashed = await http.get(path), await http.get(path + "/")
    assert plain.status_code == slashed.status_code == 200
    assert slashed.json() == plain.json() if path != "/metrics" else slashed.text


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions/", BODY), ("/v1/chat/completions/", chat(max_tokens=1)),
                       ("/tokenize/", {"prompt": "a"})],
)  # fmt: skip
async def test_a_body_is_not_lost(path: str, body: dict[str, Any]) -> None:
    async with client() as http:
        assert (await http.post(path, json=body)).status_code == 200


def test_the_official_client_may_have_a_slash_too_many() -> None:
    with serving() as live, openai.OpenAI(base_url=live.url + "/v1/", api_key="x", timeout=WAIT) as ours:
        assert [each.id for each in ours.models.list()] == [MODEL]
        assert ours.get("/models/", cast_to=httpx.Response).status_code == 200
        assert ours.completions.create(model=MODEL, prompt="a", max_tokens=1).usage is not None


async def test_a_name_may_end_with_a_slash() -> None:
    async with client(served_model_name=("models/mine/", "other")) as http:
        for path, name in (("models/mine/", "models/mine/"), ("other", "other"), ("other/", "other")):
            response = await http.get(f"/v1/models/{path}")
            assert response.json()["id"] == name
        assert (await http.get("/v1/models/another/")).status_code == 404


async def test_a_slash_opens_nothing() -> None:
    """What asks for a key, or for the administrator's, is the place, however it is written."""
    async with client(api_key=("secret",), admin_api_key="chief") as http:
        assert (await http.get("/v1/models/")).status_code == 401
        for path in ("/reset_prefix_cache/", "/reset_prefix_cache//", "//reset_prefix_cache"):
            response = await http.post(HOST + path, headers={"x-api-key": "secret"})
            assert response.status_code in (403, 404), path
        assert (await http.post("/reset_prefix_cache/", headers={"x-api-key": "chief"})).status_code == 200


async def test_the_place_counts_as_one() -> None:
    service = AppState(FakeBackend(), ServerConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url=HOST) as http:
        await http.post("/v1/completions/", json=BODY)
        await http.post("/v1/completions", json=BODY)
    (row,) = (each for each in service.metrics.rows() if each.name == "quintet:http_requests_total")
    assert (row.labels, row.values) == (("/v1/completions", "POST", "200"), [2])


async def test_below_a_prefix_that_a_proxy_strips() -> None:
    app = make_app(AppState(FakeBackend(), ServerConfig(root_path="/api")))
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        for path in ("/api/v1/models/", "/api/", "/v1/models/"):
            assert (await http.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1//chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/v1/models", "did you mean '/v1/models'?"),
        ("/v1/tokenize", "did you mean '/tokenize'?"),
        ("/sleep", "start the server with --enable-sleep-mode"),
        ("/nothing", "/openapi.json lists what there is"),
    ],
)
async def test_what_is_nowhere_is_answered_with_where_to_look(path: str, told: str) -> None:
    async with client() as http:
        for method in ("GET", "POST"):
            response = await http.request(method, HOST + path)
            assert response.status_code == 404 and told in response.json()["error"]["message"]
