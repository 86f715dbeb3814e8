"""Who may call what: keys on every route, names and origins, headers of every answer, the access log."""

import logging
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST, chat, client

OPEN = {("GET", path) for path in ("/live", "/health", "/ready", "/readyz", "/ping", "/", "/page/{name}")}
JSON = {"content-type": "application/json"}
MINE = ("my.example", "*.wild.example", "fd00::1")


def routes() -> list[tuple[str, str]]:
    """Every (method, path) of the app, those of tomorrow too."""
    app = make_app(AppState(FakeBackend(), ServerConfig()))
    found = set()
    for route in iter_route_contexts(app.routes):
        path = getattr(route, "path_format", None) or route.path
        found |= {(method, path) for method in route.methods or {"GET"} if method != "HEAD"}
    return sorted(found)


@pytest.mark.parametrize(("method", "path"), routes())
async def test_every_route_asks_for_a_key(method: str, path: str) -> None:
    where = path.replace("{", "").replace("}", "")
    async with client(api_key=("secret", "other")) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "secret"}):
            response = await http.request(method, where, headers=headers)
            assert (response.status_code == 401) != ((method, path) in OPEN), (headers, response.text)
        for headers in ({"authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "secret"}):
            assert (await http.request(method, where, headers=headers)).status_code != 401


def test_the_routes_are_all_there() -> None:
    assert {
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/openapi.json"),
        ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"), ("POST", "/reset_prefix_cache"), *OPEN,
    } <= set(routes())  # fmt: skip


async def test_what_is_not_there_asks_for_a_key_too() -> None:
    async with client(api_key=("secret",)) as http:
        for method, path in (("GET", "/metrics"), ("GET", "/nothing"), ("POST", "/health"), ("POST", "/"),
                             ("GET", "/health/x"), ("GET", "/pages/x")):  # fmt: skip
            response = await http.request(method, path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


async def test_a_prefix_opens_nothing() -> None:
    """The path that is checked is the one that is routed."""
    app = make_app(AppState(FakeBackend(), ServerConfig(api_key=("secret",), root_path="/api")))
    transport = httpx.ASGITransport(app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url=HOST) as http:
        for path, status in (("/api/health", 200), ("/health", 200), ("/api/v1/models", 401), ("/v1/models", 401),
                             ("/api/api/health", 401), ("/apihealth", 401)):  # fmt: skip
            assert (await http.get(path)).status_code == status, path


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        ("127.0.0.1:8000", {}, 200), ("localhost", {}, 200), ("LOCALHOST:1", {}, 200), ("[::1]:8000", {}, 200),
        ("app.localhost", {}, 200), ("127.8.8.8", {}, 200), ("evil.example", {}, 421), ("evil.example:8000", {}, 421),
        ("192.168.0.2", {}, 421), ("localhost.evil.example", {}, 421), ("127.0.0.1.evil.example", {}, 421),
        ("[::", {}, 421), ("evil.example", {"host": "0.0.0.0"}, 200), ("evil.example", {"uds": "/x"}, 200),
        ("evil.example", {"host": "::1"}, 421), ("localhost@evil.example", {}, 421), ("", {}, 421),
        ("my.example:80", {"allowed_hosts": MINE}, 200), ("MY.example", {"allowed_hosts": MINE}, 200),
        ("localhost:8000", {"allowed_hosts": MINE}, 200), ("evil.example", {"allowed_hosts": MINE}, 421),
        ("a.my.example", {"allowed_hosts": MINE}, 421), ("a.wild.example", {"allowed_hosts": MINE}, 200),
        ("a.b.wild.example", {"allowed_hosts": MINE}, 200), ("wild.example", {"allowed_hosts": MINE}, 421),
        ("evilwild.example", {"allowed_hosts": MINE}, 421), ("[fd00::1]:80", {"allowed_hosts": MINE}, 200),
        ("[fd00:0::1]", {"allowed_hosts": MINE}, 200), ("[fd00::2]", {"allowed_hosts": MINE}, 421),
        ("evil.example", {"allowed_hosts": ("*",)}, 200),
        ("evil.example", {"host": "0.0.0.0", "allowed_hosts": MINE}, 421),
        ("my.example", {"host": "0.0.0.0", "allowed_hosts": MINE}, 200),
        ("127.0.0.1:8000", {"host": "0.0.0.0", "allowed_hosts": MINE}, 200),  # a container's own health check
        ("10.1.2.3:8000", {"host": "0.0.0.0", "allowed_hosts": MINE}, 200),  # a probe's: rebinding needs a name
        ("evil.example", {"uds": "/x", "allowed_hosts": MINE}, 421),
    ],
)  # fmt: skip
async def test_a_server_answers_to_its_names(host: str, settings: dict[str, Any], status: int) -> None:
    async with client(**settings) as http:
        response = await http.get("/v1/models", headers={"host": host})
    assert response.status_code == status
    if status == 421:
        assert response.json()["error"]["code"] == "wrong_host" and "--allowed-hosts" in response.text


@pytest.mark.parametrize("name", ["http://my.example", "my.example:8000", "my.example/x", "", "a b", "*.", "a.*.b"])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("origin", "settings", "status"),
    [
        (None, {}, 200), ("http://127.0.0.1", {}, 200), ("https://evil.example", {}, 403), ("null", {}, 403),
        ("http://127.0.0.1:3000", {}, 403), ("https://a.example", {"allowed_origins": ("https://a.example",)}, 200),
        ("https://b.example", {"allowed_origins": ("https://a.example",)}, 403),
        ("https://b.example", {"allowed_origins": ("*",)}, 200), ("http://127.0.0.1.evil.example", {}, 403),
    ],
)  # fmt: skip
async def test_pages_of_other_origins_may_not_post(origin: str | None, settings: dict[str, Any], status: int) -> None:
    headers = {} if origin is None else {"origin": origin}
    async with client(**settings) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        assert response.status_code == status, response.text
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    shared = response.headers.get("access-control-allow-origin")
    assert (shared is not None) == (bool(settings) and status == 200)


async def test_browsers_may_ask_first_without_a_key() -> None:
    asks = {"origin": "https://a.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization"}  # fmt: skip
    async with client(api_key=("k",), allowed_origins=("https://a.example",)) as http:
        allowed = await http.options("/v1/completions", headers=asks)
        refused = await http.options("/v1/completions", headers={**asks, "origin": "https://b.example"})
        error = await http.post("/v1/completions", headers={"origin": "https://a.example"})
    assert allowed.status_code == 200 and "authorization" in allowed.headers["access-control-allow-headers"]
    assert refused.status_code == 400
    assert error.status_code == 401 and error.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3_x", True), ("", False), ("a b", False), ("x" * 129, False),
                                             ("é", False), ("a\tb", False), ("-a", False)])  # fmt: skip
async def test_a_sane_request_id_is_kept(given: str, kept: bool) -> None:
    async with client() as http:
        headers = {"x-request-id": given.encode("latin-1")}
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)
        error = await http.get("/nothing", headers=headers)
    got = answer.headers["x-request-id"]
    assert (got == given) is kept and answer.json()["id"] == f"cmpl-{got}"
    assert (error.headers["x-request-id"] == given) is kept


async def test_every_answer_is_taken_for_what_it_says() -> None:
    async with client(max_body_bytes=10, api_key=("k",)) as http:
        for path, headers in (("/health", {}), ("/v1/models", {}), ("/nothing", {"x-api-key": "k"}), ("/", {})):
            response = await http.get(path, headers=headers)
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quintet.access")
    async with client(FakeBackend(cached=2)) as http:
        for stream in (False, True):
            body = chat("a secret", max_tokens=2, stream=stream)
            await http.post("/v1/chat/completions?key=hidden", json=body, headers={"x-request-id": f"r{stream:d}"})
        await http.get("/no%0Athing%20here")
    whole, streamed, missing = [each.getMessage() for each in caplog.records if each.name == "quintet.access"]
    for line, name in ((whole, "r0"), (streamed, "r1")):
        assert "POST /v1/chat/completions 200" in line and line.endswith(f"request {name}")
        assert "2 cached, 2 completion tokens" in line and "ms, first byte" in line
        assert "secret" not in line and "hidden" not in line
    assert "GET /no%0Athing%20here 404" in missing
    caplog.clear()
    async with client(access_log=False) as http:
        await http.get("/health")
    assert not [record for record in caplog.records if record.name == "quintet.access"]


async def test_our_own_failure_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeBackend):
        async def reset_prefix_cache(self) -> None:
            raise KeyError("/secret/path")

    async with client(Broken()) as http:
        response = await http.post("/reset_prefix_cache", headers={"x-request-id": "r1"})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert "/secret/path" not in response.text and "request r1 failed" in caplog.text
