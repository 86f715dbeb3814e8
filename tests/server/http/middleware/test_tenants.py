"""Several keys are several tenants: what one stores, sends and takes up. What the administrator's key alone opens."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.capacity import CapacityLimiter, RequestCost
from quintet.server.http.errors import ApiError
from quintet.server.http.middleware.auth import ADMIN_PATHS
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import chat, client

KEYS = ("alice", "bob")
UNSALTED: dict[str, dict[str, Any]] = {  # APIs without a field cache_salt
    "/api/chat": chat(model=MODEL, options={"num_predict": 1}),
    "/api/generate": {"model": MODEL, "prompt": "Hi", "options": {"num_predict": 1}},
    **dict.fromkeys(("/completion", "/completions"), {"prompt": "Hi", "n_predict": 1}),
}
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": chat(max_tokens=1),
    "/v1/chat/completions/batch": {"messages": [chat()["messages"]], "max_tokens": 1},
    "/invocations": chat(max_tokens=1),
    "/generative_scoring": {"query": "Hi", "items": ["Ho"], "label_token_ids": [1]},
    "/v1/messages": chat(max_tokens=1, model=None),
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    **UNSALTED,
}
NUMBERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/classify": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/api/embed": {"model": MODEL, "input": "Hi"},
    "/api/embeddings": {"model": MODEL, "prompt": "Hi"},
    **dict.fromkeys(("/embedding", "/embeddings"), {"content": "Hi"}),
    **dict.fromkeys(("/score", "/v1/score"), {"data_1": "Hi", "data_2": "Ho"}),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), {"query": "Hi", "documents": ["Ho"]}),
}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def status(http: httpx.AsyncClient, method: str, path: str, who: str, **rest: Any) -> int:
    return (await http.request(method, path, headers=key(who), **rest)).status_code


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_is_found_by_its_own_key_alone(background: bool) -> None:
    async with client(api_key=KEYS) as http:
        body = {**ASKS["/v1/responses"], "background": background}
        made = (await http.post("/v1/responses", json=body, headers=key("alice"))).json()["id"]
        path = f"/v1/responses/{made}"
        for method, where in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            assert await status(http, method, path + where, "bob") == 404
        goes_on = {"input": "And?", "previous_response_id": made}
        refused = await http.post("/v1/responses", json=goes_on, headers=key("bob"))
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "previous_response_not_found"
        if background:
            assert await status(http, "GET", path + "?stream=true", "bob") == 404
            assert await status(http, "POST", path + "/cancel", "alice") == 200
        else:
            assert await status(http, "POST", "/v1/responses", "alice", json=goes_on) == 200
        for method, where in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            assert await status(http, method, path + where, "alice") == 200
        assert await status(http, "GET", path, "alice") == 404


async def salts(path: str, who: str, keys: tuple[str, ...] = KEYS, **fields: Any) -> str | None:
    """With which the engine gets a request."""
    numbers = PoolingBounds(("embed", "classify"), 512, 16, "MEAN") if path in NUMBERS else None
    fake = FakeBackend(pooling=numbers, labels=("no", "yes"))
    async with client(fake, api_key=keys) as http:
        assert await status(http, "POST", path, who, json={**(ASKS | NUMBERS)[path], **fields}) == 200
    return fake.submitted[0].prompt.cache_salt


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
@pytest.mark.parametrize("path", ASKS)
async def test_caches_of_two_keys_have_nothing_in_common(path: str, fields: dict[str, Any]) -> None:
    if ("background" in fields and path != "/v1/responses") or ("stream" in fields and path.endswith("/batch")):
        return
    alice, bob = await salts(path, "alice", **fields), await salts(path, "bob", **fields)
    assert alice and bob and alice != bob and alice == await salts(path, "alice", **fields)
    assert "alice" not in alice
    if path in UNSALTED:
        return
    own = await salts(path, "alice", cache_salt="pepper", **fields)
    assert own and own != alice
    for taken in (alice, own, "pepper"):  # nothing that bob may say leads to alice's
        assert await salts(path, "bob", cache_salt=taken, **fields) not in (alice, own)


@pytest.mark.parametrize("path", NUMBERS)
async def test_nor_have_those_of_texts_that_become_numbers(path: str) -> None:
    alice, bob = await salts(path, "alice"), await salts(path, "bob")
    assert alice and bob and alice != bob and alice == await salts(path, "alice")


@pytest.mark.parametrize("keys", [("alice",), ("alice", "alice"), ()])
async def test_one_key_changes_no_salt(keys: tuple[str, ...]) -> None:
    assert await salts("/v1/completions", "alice", keys) is None
    assert await salts("/v1/completions", "alice", keys, cache_salt="pepper") == "pepper"


def lets_in(gate: CapacityLimiter, owner: str, num: int = 1) -> bool:
    try:
        gate.acquire(RequestCost(num, num), owner)
    except ApiError as error:
        assert error.status == 429 and int(error.headers["Retry-After"]) >= 1
        return False
    return True


def test_a_key_that_waits_finds_its_share_free() -> None:
    gate = CapacityLimiter(RequestCost(8, 1000))
    assert all(lets_in(gate, "alice") for _ in range(8))  # nobody else wants any
    assert not lets_in(gate, "bob")
    for _ in range(3):
        gate.release(RequestCost(1, 1), "alice")
        assert not lets_in(gate, "alice")  # bob is expected, and alice has more than half
        assert lets_in(gate, "bob")
        assert not lets_in(gate, "alice") and not lets_in(gate, "bob")  # full
    assert gate.held.completions == 8


def test_a_share_is_a_part_for_each_that_holds_or_waits() -> None:
    gate = CapacityLimiter(RequestCost(9, 1000))
    assert lets_in(gate, "alice", 5) and lets_in(gate, "bob", 4)
    assert not lets_in(gate, "carol", 2)
    gate.release(RequestCost(5, 5), "alice")
    assert lets_in(gate, "alice", 3)  # who holds nothing is let in where there is room
    assert not lets_in(gate, "alice", 1) and not lets_in(gate, "bob", 1)
    assert lets_in(gate, "carol", 2)


def test_nobody_is_waited_for_longer_than_it_was_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("quintet.server.http.fair_share.monotonic", lambda: now[0])
    gate = CapacityLimiter(RequestCost(8, 1000))
    assert lets_in(gate, "alice", 8) and not lets_in(gate, "bob")
    gate.release(RequestCost(8, 8), "alice")
    assert lets_in(gate, "alice", 5) and not lets_in(gate, "alice")
    now[0] = 200.0
    assert lets_in(gate, "alice", 3)


async def test_callers_of_one_key_do_not_take_everything_from_another() -> None:
    fake = FakeBackend(hang=0)
    ask = {"prompt": "x", "max_tokens": 2}
    async with client(fake, api_key=KEYS, max_queued_requests=4) as http:

        def post(who: str, n: int) -> "asyncio.Task[int]":
            return asyncio.create_task(status(http, "POST", "/v1/completions", who, json={**ask, "n": n}))

        first = post("alice", 3)
        while not fake.submitted:
            await asyncio.sleep(0)
        assert await post("bob", 2) == 429
        assert await post("alice", 1) == 429
        second = post("bob", 1)
        while len(fake.submitted) < 2:
            await asyncio.sleep(0)
        fake.go_on.set()
        assert [await first, await second] == [200, 200]
        assert await post("alice", 4) == 200 and not http._transport.app.state.service.capacity.held.completions  # type: ignore[attr-defined]


async def test_no_id_of_a_response_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with client(api_key=KEYS) as http:
        answer = await http.post("/v1/responses", json=ASKS["/v1/responses"], headers=key("alice"))
        made = answer.json()["id"]
        for method, path in (
            ("GET", f"/v1/responses/{made}"), ("HEAD", f"/v1/responses/{made}"), ("GET", f"/v1//responses/{made}"),
            ("GET", f"/v1/responses/{made}/input_items"), ("GET", f"/x%2F{made}%20y"),
            ("DELETE", f"/v1/responses/{made}"),
        ):  # fmt: skip
            for who in ("alice", "nobody"):
                await http.request(method, path, headers=key(who))
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("quintet")]
    assert len(lines) == 13 and any("GET /v1/responses/resp_w0_*/input_items 200" in line for line in lines)
    assert not any(made.rpartition("_")[2] in line for line in lines)


def routes(method: str) -> set[str]:
    app = make_app(AppState(FakeBackend(), ServerConfig(enable_sleep_mode=True, enable_rl_routes=True), profiles=True))
    return {path for path, known in app.openapi()["paths"].items() if method in known}


def test_every_route_that_changes_the_engine_for_all_is_the_administrators() -> None:
    """A new one belongs to one of the two."""
    counts = {"/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"}
    of_ollama = {f"/api/{each}" for each in ("show", "pull", "create", "copy", "push", "blobs/{digest}")}  # no change
    of_speech = {"/v1/audio/transcriptions", "/v1/audio/translations"}
    callers = {*counts, "/v1/responses/{response_id}/cancel", "/infill", "/apply-template", *of_ollama, *of_speech}
    rendered = {f"/v1/{each}/render" for each in ("chat/completions", "completions", "messages", "responses")}
    derendered = {f"/v1/{each}/derender" for each in ("chat/completions", "completions")}
    callers |= {*ASKS, *NUMBERS, *rendered, *derendered}
    assert routes("post") == callers | set(ADMIN_PATHS)
    assert routes("delete") | routes("put") | routes("patch") == {"/v1/responses/{response_id}", "/api/delete"}


@pytest.mark.parametrize("keys", [(), ("alice",), KEYS])
async def test_administration_has_a_key_of_its_own(keys: tuple[str, ...]) -> None:
    fake = FakeBackend()
    async with client(fake, True, api_key=keys, admin_api_key="root", enable_sleep_mode=True) as http:
        for path in ADMIN_PATHS:
            for headers in ({}, key("nobody"), *[{"x-api-key": each} for each in keys]):
                refused = await http.post(path, headers=headers)
                known = bool(headers) and "x-api-key" in headers
                assert refused.status_code == (403 if known else 401), refused.text
                assert refused.json()["error"]["code"] == ("admin_only" if known else "invalid_api_key")
            assert not fake.resets and not fake.asleep
        on = {"/reset_prefix_cache", "/sleep", "/wake_up", "/start_profile", "/stop_profile"}
        on |= {"/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory"}
        for path in ADMIN_PATHS:
            assert await status(http, "POST", path, "root") == (200 if path in on else 404)  # the others are off
        assert await status(http, "GET", "/v1/models", "root") == 200
        assert await status(http, "GET", "/v1/models", "nobody") == (401 if keys else 200)
    assert fake.resets == 3  # prefixes, media, encoders


async def test_without_an_administrators_key_every_key_administers() -> None:
    async with client(api_key=KEYS) as http:
        assert await status(http, "POST", "/reset_prefix_cache", "bob") == 200


def test_the_administrators_key_is_nobody_elses() -> None:
    with pytest.raises(ValueError, match="admin_api_key is an api_key too"):
        ServerConfig(api_key=("a", "root"), admin_api_key="root")
    assert "admin_api_key" not in repr(ServerConfig(admin_api_key="root"))
