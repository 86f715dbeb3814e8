"""The routes of sleep over a fake engine: only with the flag; who is refused meanwhile, and what still answers."""

import asyncio
from typing import Any

import pytest

from tests.server.fakes import FakeBackend
from tests.server.http.serving import chat, client

ON: dict[str, Any] = {"enable_sleep_mode": True}


async def test_without_the_flag_there_are_no_such_routes() -> None:
    async with client() as http:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert (await http.request(method, path)).status_code == 404
        assert "/sleep" not in (await http.get("/openapi.json")).json()["paths"]


async def test_asleep_it_is_not_ready_and_says_why() -> None:
    backend = FakeBackend()
    async with client(backend, **ON) as http:
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await http.post("/sleep")).json() == {"status": "asleep"} and backend.asleep == 1
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        asked = [await http.get("/ready"), await http.post("/v1/completions", json={"prompt": "x"})]
        asked += [await http.post("/v1/chat/completions", json=chat()), await http.post("/reset_prefix_cache")]
        for answer in asked:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (503, "service_unavailable", "asleep")
            assert "the engine is asleep (level 1), and POST /wake_up wakes it" in error["message"]
            assert answer.headers["retry-after"]
        claude = await http.post("/v1/messages", json={**chat(), "max_tokens": 5, "model": "fake/model"})
        assert claude.status_code == 503 and claude.json()["error"]["type"] == "overloaded_error"
        for path in ("/health", "/v1/models"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "Hello"})).json()["count"] == 2
        assert (await http.post("/wake_up")).json() == {"status": "awake"}
        assert (await http.get("/ready")).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert len(backend.submitted) == 1


async def test_a_request_that_meets_the_engine_falling_asleep_is_refused_as_one_that_comes_later() -> None:
    backend = FakeBackend(hang=0, fail_at=0)  # as the engine answers what comes to it asleep
    async with client(backend, **ON) as http:
        asked = [http.post("/v1/completions", json={"prompt": "x", "stream": stream}) for stream in (False, True)]
        answers = [asyncio.ensure_future(each) for each in asked]
        while backend.hanging < 2:
            await asyncio.sleep(0.001)
        assert (await http.post("/sleep")).status_code == 200
        backend.go_on.set()
        for answer in await asyncio.gather(*answers):
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "asleep"
            assert answer.headers["retry-after"]


async def test_levels_and_tags() -> None:
    backend = FakeBackend()
    async with client(backend, **ON) as http:
        for query in ("level=0", "level=3", "level=x"):
            wrong = await http.post(f"/sleep?{query}")
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "level"
        assert (await http.post("/sleep?level=2")).status_code == 200 and backend.asleep == 2
        wrong = await http.post("/wake_up?tags=memory")
        assert wrong.status_code == 400 and "weights" in wrong.json()["error"]["message"]
        assert wrong.json()["error"]["param"] == "tags" and backend.asleep == 2
        assert (await http.post("/wake_up?tags=weights&tags=kv_cache")).status_code == 200 and not backend.asleep
        assert backend.woken == ["weights", "kv_cache"]


@pytest.mark.parametrize(("path", "status", "code"), [("/sleep", 400, "cannot_sleep"), ("/wake_up", 503, "asleep")])
async def test_what_the_engine_refuses_is_told(path: str, status: int, code: str) -> None:
    async with client(FakeBackend(refuses="the engine has 2 requests"), **ON) as http:
        answer = await http.post(path)
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert "the engine has 2 requests" in answer.json()["error"]["message"]


async def test_keys_guard_it() -> None:
    async with client(FakeBackend(), api_key=("secret",), **ON) as http:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert (await http.request(method, path)).status_code == 401


async def test_the_memory_of_the_cache_alone_is_given_back() -> None:
    backend = FakeBackend()
    async with client(backend, **ON) as http:
        assert (await http.post("/release_kv_cache_memory")).json() == {"status": "released"}
        assert backend.woken == ["weights"]
        backend.refuses = "requests run"
        refused = await http.post("/release_kv_cache_memory")
    assert refused.status_code == 400 and refused.json()["error"]["message"] == "requests run"
    async with client() as http:
        assert "--enable-sleep-mode" in (await http.post("/release_kv_cache_memory")).text
