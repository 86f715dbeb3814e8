"""HTTP of a server of several models: names, aliases, lists, routes and administration. Engines are fakes."""

import asyncio
import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from quintet.clients.http_client import ServerAddress
from quintet.router.models.app import ModelsApp
from quintet.router.models.config import ModelsConfig, ModelSpec
from quintet.router.models.core import ModelsCore
from quintet.router.server import RouterServer
from quintet.server.config import ServerConfig
from quintet.server.listen import listen
from tests.router.fakes import DONE, EVENTS, Call, Fake, until
from tests.router.models.worlds import FakeEngine, World, spec

SPECS = [spec("a", aliases=("gpt-4o", "claude-*")), spec("b"), spec("c")]
HI = {"messages": [{"role": "user", "content": "Hi"}]}


class Door:
    """A server that runs before fake engines, and a client of it."""

    def __init__(
        self, server: RouterServer, core: ModelsCore, world: World, fakes: dict[str, Fake], client: httpx.AsyncClient
    ) -> None:
        self.server, self.core, self.world, self.fakes, self.client = server, core, world, fakes, client

    def engine(self, name: str) -> FakeEngine:
        return self.world.engine(name)

    async def chat(self, model: str | None = "a", **more: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return await self.client.post("/v1/chat/completions", json={**named, **HI}, **more)


@contextlib.asynccontextmanager
async def door(
    specs: list[ModelSpec] = SPECS, world: World | None = None, server: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Door]:
    fakes = {each.name: await Fake(each.name).start() for each in specs}
    world = world or World(load_seconds=lambda name: 0.02, end_seconds=lambda name: 0.0)
    world.address = lambda name: ServerAddress("127.0.0.1", fakes[name].port)
    models = ModelsConfig(memory_budget=world.budget, **{"keep_alive": -1, **config})
    core = ModelsCore(specs, models, world.start, world.estimate)
    world.manager = core.manager
    settings = ServerConfig(port=0, **{"access_log": False, **(server or {})})
    running = RouterServer(core, settings, ModelsApp)
    running._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    listener = listen(settings)
    task = asyncio.get_running_loop().create_task(running.run(listener))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {"authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {}
    try:
        async with httpx.AsyncClient(base_url=base, timeout=None, headers=headers) as client:
            yield Door(running, core, world, fakes, client)
    finally:
        running._server.should_exit = True
        running._server.disconnect_all()
        await until(task.done)
        task.result()
        for each in fakes.values():
            await each.stop()


@pytest.mark.parametrize(
    ("asked", "by"),
    [("a", "a"), ("b", "b"), ("gpt-4o", "a"), ("claude-sonnet-4-5", "a"), ("b:latest", "b"), (None, "a")],
)
async def test_the_model_of_a_request_answers(asked: str | None, by: str) -> None:
    async with door() as there:
        assert (await there.chat(asked)).json() == {"by": by}
        (call,) = there.fakes[by].calls
        assert call.json.get("model") == (None if asked is None else by), "the engine gets its model's own name"
        assert call.json["messages"] == HI["messages"]


async def test_a_models_adapters_are_names_that_its_engine_answers() -> None:
    adapted = ServerConfig(lora_modules=["sql=adapters/sql"])
    specs = [spec("a"), dataclasses.replace(spec("b", aliases=("alias",)), server=adapted)]
    async with door(specs) as there:
        for asked, engines in (("sql", "sql"), ("sql:latest", "sql"), ("alias", "b")):
            assert (await there.chat(asked)).json() == {"by": "b"}
            assert there.fakes["b"].calls[-1].json["model"] == engines
        cards = {each["id"]: each for each in (await there.client.get("/v1/models")).json()["data"]}
        assert list(cards) == ["a", "b", "sql"]
        assert (cards["sql"]["parent"], cards["sql"]["root"]) == ("b", "adapters/sql")
        assert (await there.client.get("/v1/models/sql")).json() == cards["sql"]


async def test_an_unknown_model_is_a_404_that_lists_all() -> None:
    async with door() as there:
        answer = await there.chat("gpt-5")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "the model 'gpt-5' is not served here; there is a, b, c"
        assert there.world.starts == []


async def test_the_list_has_all_models_and_their_states() -> None:
    async with door() as there, AsyncOpenAI(base_url=f"{there.client.base_url}/v1", api_key="k") as client:
        await there.chat("b")
        listed = (await there.client.get("/v1/models")).json()["data"]
        states = {each["id"]: each["status"]["value"] for each in listed}
        assert states == {"a": "unloaded", "b": "loaded", "c": "unloaded"}
        assert [each.id async for each in client.models.list()] == ["a", "b", "c"]
        one = (await there.client.get("/v1/models/gpt-4o")).json()
        assert (one["id"], one["aliases"]) == ("a", ["gpt-4o", "claude-*"])
        anthropic = (await there.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [each["id"] for each in anthropic["data"]] == ["a", "b", "c"]
        assert (await there.client.get("/models")).json()["data"] == listed
        assert (await there.client.get("/v1/models/none")).status_code == 404


async def test_ollamas_lists_have_all_models() -> None:
    ollama = pytest.importorskip("ollama")
    async with door() as there:
        await there.chat("b")
        client = ollama.AsyncClient(host=str(there.client.base_url))
        assert [each.model for each in (await client.list()).models] == ["a:latest", "b:latest", "c:latest"]
        (loaded,) = (await client.ps()).models
        assert (loaded.model, loaded.context_length) == ("b:latest", there.core.statuses()[1].max_model_len)
        assert loaded.expires_at is not None and loaded.expires_at.year == 9999, "it is kept"
        assert loaded.size == there.core.statuses()[1].memory > 0
        assert "version" in (await there.client.get("/api/version")).json()
        assert there.fakes["b"].calls[1:] == [] and there.fakes["a"].calls == []


async def test_streams_pass_through() -> None:
    async def behave(call: Call) -> None:
        await call.stream([*EVENTS, DONE])

    async with door() as there:
        there.fakes["a"].behave = behave
        assert (await there.chat(params={"x": "1"})).content == b"".join([*EVENTS, DONE])
        assert there.fakes["a"].calls[0].path == "/v1/chat/completions?x=1"


@pytest.mark.parametrize(
    ("method", "path", "body", "by"),
    [
        ("POST", "/v1/embeddings", {"model": "b", "input": "x"}, "b"),
        ("POST", "/rerank", {"model": "b", "query": "x", "documents": []}, "b"),
        ("POST", "/tokenize", {"model": "c", "prompt": "x"}, "c"),
        ("POST", "/api/chat", {"model": "b:latest"}, "b"),
        ("POST", "/completion", {"prompt": "x"}, "a"),
        ("POST", "/infill", {"model": "c", "input_prefix": "x"}, "c"),
        ("POST", "/apply-template", {"messages": []}, "a"),
        ("GET", "/props", None, "a"),
        ("GET", "/props?model=c", None, "c"),
        ("POST", "/api/show", {"name": "c"}, "c"),
        ("POST", "/api/show", {"name": "b:latest", "model": "a"}, "a"),
        ("GET", "/props?model=gpt-4o", None, "a"),
        ("GET", "/slots?model=b:latest", None, "b"),
    ],
)
async def test_routes_of_every_api_go_to_the_model_that_they_name(
    method: str, path: str, body: dict[str, Any] | None, by: str
) -> None:
    async with door() as there:
        answer = await there.client.request(method, path, json=body)
        assert answer.json() == {"by": by}
        assert there.fakes[by].calls[0].path == path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"), ("POST", "/sleep//"), ("POST", "/sleep%3Flevel=2"), ("POST", "/%2573leep"),
        ("POST", "/reset_prefix_cache/"), ("POST", "/start_profile//"), ("GET", "/v1/anything"),
        ("GET", "/wp-login.php"),
        ("POST", "/wp-login.php"), ("POST", "/api/delete"), ("DELETE", "/api/delete"), ("POST", "/api/push"),
        ("POST", "/v1/chat/completions//"), ("POST", "/v1/chat//completions"), ("HEAD", "/api/blobs/sha256:0"),
        ("POST", "/v1/x%20HTTP/1.1%0d%0ahost:a%0d%0acontent-length:0%0d%0a%0d%0aPOST%20/v1/chat/completions"),
    ],
)  # fmt: skip
async def test_a_path_that_no_engine_answers_reaches_none_and_loads_none(method: str, path: str) -> None:
    async with door() as there:
        answer = await there.client.request(method, path, json={"model": "b", **HI})
        assert answer.status_code == 404
        assert there.world.starts == [] and all(not fake.calls for fake in there.fakes.values())


async def test_the_page_has_its_policy() -> None:
    async with door() as there:
        for path in ("/", "/page/app.js"):
            headers = (await there.client.get(path)).headers
            assert headers["content-security-policy"].startswith("default-src 'self'")
            assert headers["x-content-type-options"] == "nosniff"


async def test_a_form_goes_to_the_first_model() -> None:
    async with door() as there:
        answer = await there.client.post("/pooling", files={"file": b"x"}, data={"n": "1"})
        assert answer.json() == {"by": "a"}


async def test_what_no_engine_answers_is_refused() -> None:
    async with door() as there:
        assert "models: a, b, c" in (await there.client.get("/nothing")).json()["error"]["message"]
        assert "POST /models/unload" in (await there.client.post("/sleep")).json()["error"]["message"]
        bad = await there.client.post("/v1/chat/completions", content=b"{")
        assert bad.status_code == 400 and there.world.starts == []


async def test_callers_keys_are_checked_and_engines_get_another() -> None:
    async with door(server={"api_key": ["one", "two"], "admin_api_key": "admin"}) as there:
        assert (await there.chat(headers={"authorization": "Bearer no"})).status_code == 401
        assert (await there.chat()).json() == {"by": "a"}
        sent = there.fakes["a"].calls[0]
        assert sent.header("authorization") not in ("Bearer one", None) and sent.header("x-quintet-owner")
        for path in ("/models/load", "/models/unload"):
            assert (await there.client.post(path, json={"model": "a"})).status_code == 403
        assert (await there.client.get("/models/loaded")).status_code == 403
        assert (await there.client.get("/health", headers={"authorization": ""})).status_code == 200


async def test_an_administrator_loads_lists_and_unloads() -> None:
    async with door(keep_alive=60) as there:
        loaded = await there.client.post("/models/load", json={"model": "gpt-4o"})
        assert loaded.json() == {"success": True, "model": "a", "status": {"value": "loaded"}}
        found = (await there.client.get("/models/loaded")).json()
        assert [(each["name"], each["state"], each["memory"]) for each in found["models"]] == [("a", "loaded", 10)]
        assert found["memory"] == {"budget": 20, "planned": 10} and 0 < found["models"][0]["expires"] <= 60
        unloaded = await there.client.post("/models/unload", json={"model": "a"})
        assert unloaded.json()["status"] == {"value": "unloaded"} and not there.world.alive
        assert (await there.client.post("/models/unload", json={"model": "z"})).status_code == 404
        assert (await there.client.post("/models/unload", json={})).status_code == 400
        assert (await there.client.get("/models/unload")).status_code == 405


async def test_a_request_that_meets_a_dead_engine_is_answered_by_the_next_one() -> None:
    async with door() as there:
        await there.chat()

        async def dying(call: Call) -> None:
            there.fakes["a"].behave = None
            there.engine("a").kill()
            await call.say({"error": {"code": "engine_dead"}}, 503, "retry-after: 5\r\n")

        there.fakes["a"].behave = dying
        assert (await there.chat()).json() == {"by": "a"} and there.world.starts == ["a", "a"]


async def test_a_request_that_ends_two_engines_is_given_up() -> None:
    async with door() as there:

        async def deadly(call: Call) -> None:
            there.engine("a").kill()
            call.cut()

        there.fakes["a"].behave = deadly
        answer = await there.chat()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "backend_unreachable"
        assert there.world.starts == ["a", "a"]


async def test_a_busy_engines_refusal_is_passed_on() -> None:
    async def full(call: Call) -> None:
        await call.say({"error": {"code": "server_overloaded"}}, 429, "retry-after: 1\r\n")

    async with door() as there:
        there.fakes["a"].behave = full
        answer = await there.chat()
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and there.world.starts == ["a"]


async def test_an_engine_that_dies_in_the_middle_ends_its_own_stream_alone() -> None:
    async with door() as there:
        waits = asyncio.Event()

        async def slow(call: Call) -> None:
            await call.stream(EVENTS[:1])
            await waits.wait()

        async def half(call: Call) -> None:
            await call.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await call.raw(b"%x\r\n%s\r\n" % (len(EVENTS[0]), EVENTS[0]))
            there.engine("a").kill()
            call.cut()

        there.fakes["a"].behave, there.fakes["b"].behave = half, slow
        other = asyncio.ensure_future(there.chat("b"))
        await until(lambda: bool(there.fakes["b"].calls))
        broken = (await there.chat("a")).content.split(b"\n\n")
        assert json.loads(broken[1].removeprefix(b"data: "))["error"]["code"] == "backend_failed"
        waits.set()
        assert (await other).content == EVENTS[0]
        there.fakes["a"].behave = None
        await until(lambda: not [each for each in there.world.alive if each.name == "a"])
        assert (await there.chat("a")).json() == {"by": "a"}


async def test_stored_responses_are_asked_of_the_engine_that_made_them() -> None:
    async def respond(call: Call) -> None:
        await call.say({"id": "resp_1", "object": "response", "by": "b"})

    async with door() as there:
        there.fakes["b"].behave = respond
        await there.client.post("/v1/responses", json={"model": "b", "input": "x"})
        assert (await there.client.get("/v1/responses/resp_1")).json()["by"] == "b"
        assert (await there.client.get("/v1/responses/resp_2")).status_code == 404
        await there.core.manager.unload(there.world.model("b"))
        assert (await there.client.get("/v1/responses/resp_1")).status_code == 404


async def test_a_stored_response_is_visible_to_its_own_key_alone() -> None:
    async def respond(call: Call) -> None:
        await call.say({"id": "resp_1", "object": "response"})

    async with door(server={"api_key": ["one", "two"]}) as there:
        there.fakes["b"].behave = respond
        await there.client.post("/v1/responses", json={"model": "b", "input": "x"})
        assert (await there.client.get("/v1/responses/resp_1")).status_code == 200
        other = await there.client.get("/v1/responses/resp_1", headers={"authorization": "Bearer two"})
        assert other.status_code == 404


async def test_metrics_have_a_label_for_the_model_and_those_of_engines_once() -> None:
    text = (
        "# HELP vllm:num_requests_running Completions.\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="%s"} 1.0\n'
    )
    async with door() as there:
        for name in "ab":
            await there.chat(name)

            async def metrics(name: str = name) -> str:
                return text % name

            there.engine(name).metrics = metrics  # type: ignore[method-assign]
        shown = (await there.client.get("/metrics")).text
        assert 'quintet:model_loads_total{model="a"} 1.0' in shown
        assert 'quintet:model_state{model="c",state="unloaded"} 1.0' in shown
        assert 'quintet:model_requests_total{model="b",status="200"} 1.0' in shown
        assert "quintet:models_memory_planned_bytes 20.0" in shown
        assert shown.count("# TYPE vllm:num_requests_running") == 1
        assert 'vllm:num_requests_running{model_name="b"} 1.0' in shown


async def test_the_page_is_served_without_loading_a_model() -> None:
    async with door() as there:
        assert "<html" in (await there.client.get("/")).text and there.world.starts == []
        assert (await there.client.get("/page/none.js")).status_code == 404


async def test_the_server_of_several_models_extracts_the_text_of_a_pdf_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as there:
        refused = await there.client.post("/page/pdf_text", content=b"no PDF")
        monkeypatch.setitem(sys.modules, "pypdf", None)
        missing = await there.client.post("/page/pdf_text", content=b"%PDF-")
        assert there.world.starts == []
    assert refused.json()["error"]["message"] == "the PDF cannot be read: it does not begin with %PDF-"
    assert missing.status_code == 501 and "[pdf]" in missing.json()["error"]["message"]
    async with door(server={"playground": False}) as there:
        assert (await there.client.post("/page/pdf_text", content=b"%PDF-")).status_code == 404


async def test_a_second_signal_answers_requests_that_wait_for_a_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with door(world=World(load_seconds=lambda name: 3600.0)) as there:
        waiting = asyncio.ensure_future(there.chat("b"))
        await until(lambda: there.world.starts == ["b"])
        there.server.stop("SIGINT")
        assert (await there.chat("a")).status_code == 503
        assert not waiting.done()
        there.server.stop("SIGINT")
        answer = await waiting
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert "SIGINT again: 1 requests are cut short" in caplog.text and "all requests finished" not in caplog.text
    assert re.search(r"ended after \d+\.\d s: 1 requests were cut short", caplog.text)


async def test_requests_that_wait_at_the_end_of_the_drain_are_answered() -> None:
    async with door(world=World(load_seconds=lambda name: 3600.0), server={"drain_timeout": 0.05}) as there:
        waiting = asyncio.ensure_future(there.chat("b"))
        await until(lambda: there.world.starts == ["b"])
        there.server.stop("SIGTERM")
        answer = await waiting
    assert answer.json()["error"]["message"] == "the server is shutting down"
