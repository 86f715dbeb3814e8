"""Adapters (LoRA) by name: the routes that load them, the lists, and the adapter that each route's prompts get."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.lora.request import LoRAReference, LoRARequest
from quintet.lora.resolver import LoRAResolver
from quintet.server.config import ServerConfig
from quintet.server.http import served_models
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import chat, client

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ONE = {"lora_name": "a", "lora_path": "adapters/a"}


def reference(name: str) -> LoRAReference:
    return LoRAReference(name, f"adapters/{name}", f"adapters/{name}".encode())


async def with_adapters(http: httpx.AsyncClient, *names: str) -> None:
    for name in names:
        assert (await http.post(LOAD, json={"lora_name": name, "lora_path": f"adapters/{name}"})).status_code == 200


async def test_load_and_unload_have_the_texts_of_vllm() -> None:
    async with client(allow_runtime_lora=True) as http:
        answer = await http.post(LOAD, json=ONE)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert answer.headers["content-type"].startswith("text/plain")
        again = await http.post(LOAD, json=ONE)
        assert again.status_code == 400 and "'a' has already been loaded" in again.json()["error"]["message"]
        assert (await http.post(LOAD, json={**ONE, "load_inplace": True})).status_code == 200
        answer = await http.post(UNLOAD, json={"lora_name": "a", "lora_int_id": 1})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        gone = await http.post(UNLOAD, json={"lora_name": "a"})
        assert gone.status_code == 404 and gone.json()["error"]["message"] == "The lora adapter 'a' cannot be found."


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "a\n", "lora_path": "x"}, 400, "characters that can be printed"),
        ({"lora_name": MODEL, "lora_path": "x"}, 400, "is the model's own"),
        ({"lora_name": "a", "lora_path": "none"}, 404, "No adapter found for 'none'"),
        ({"lora_name": "a", "lora_path": "bad"}, 400, "tensor 'x' has the shape [1]"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(body: dict[str, Any], status: int, message: str) -> None:
    async with client(allow_runtime_lora=True) as http:
        answer = await http.post(LOAD, json=body)
        assert answer.status_code == status and message in answer.json()["error"]["message"]
        assert len((await http.get("/v1/models")).json()["data"]) == 1


async def test_without_permission_nothing_is_loaded() -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        for path in (LOAD, UNLOAD):
            answer = await http.post(path, json=ONE)
            assert answer.status_code == 404 and "--allow-runtime-lora" in answer.json()["error"]["message"]
    assert not backend.lora.served and not backend.lora.loads


async def test_the_routes_need_the_key() -> None:
    async with client(allow_runtime_lora=True, api_key=("secret",)) as http:
        assert (await http.post(LOAD, json=ONE)).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await http.post(LOAD, json=ONE, headers=headers)).status_code == 200


async def test_lists_show_adapters_with_their_base() -> None:
    async with client(allow_runtime_lora=True) as http:
        await with_adapters(http, "a", "b")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in cards] == [
            (MODEL, MODEL, None), ("a", "adapters/a", MODEL), ("b", "adapters/b", MODEL)
        ]  # fmt: skip
        assert (await http.get("/v1/models/b")).json() == cards[2]
        listed = (await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()["data"]
        assert [each["id"] for each in listed] == [MODEL, "a", "b"]
        assert [each["name"] for each in (await http.get("/api/tags")).json()["models"]][1:] == ["a:latest", "b:latest"]
        adapters = (await http.get("/lora-adapters")).json()
        assert adapters == [
            {"id": at, "path": f"adapters/{name}", "scale": 0.0, "name": name} for at, name in enumerate("ab")
        ]


TEXT_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": chat(max_tokens=2),
    "/completion": {"prompt": "Hi", "n_predict": 2},
    "/api/chat": chat(stream=False, options={"num_predict": 2}),
    "/api/generate": {"prompt": "Hi", "stream": False, "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_each_route_answers_with_the_adapter_that_the_request_names(path: str) -> None:
    backend = FakeBackend()
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a", "b")
        for name, adapter in (("b", reference("b")), ("a", reference("a")), (MODEL, None)):
            answer = await http.post(path, json={**TEXT_ROUTES[path], "model": name})
            assert answer.status_code == 200 and answer.json()["model"] == name, answer.text
            assert backend.submitted[-1].prompt.lora == adapter
        unknown = await http.post(path, json={**TEXT_ROUTES[path], "model": "c"})
        assert unknown.status_code == 404


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v2/embed", "/api/embed", "/embedding"])
async def test_pooling_routes_use_the_adapter(path: str) -> None:
    backend = FakeBackend(pooling=PoolingBounds(("embed",), 512, 16, "MEAN"))
    body = {"texts": ["Hi"]} if path == "/v2/embed" else {"input": ["Hi"]}
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a")
        answer = await http.post(path, json={**body, "model": "a"})
        assert answer.status_code == 200, answer.text
        assert backend.submitted[-1].prompt.lora == reference("a")


async def test_background_responses_use_the_adapter() -> None:
    backend = FakeBackend()
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a")
        body = {"input": "Hi", "model": "a", "background": True, "max_output_tokens": 2}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        assert backend.submitted[-1].prompt.lora == reference("a")


async def test_tenants_with_one_adapter_share_no_pages() -> None:
    backend, keys = FakeBackend(), ("alice", "bob")
    async with client(backend, allow_runtime_lora=True, api_key=keys) as http:
        for at, key in enumerate(keys):
            http.headers["Authorization"] = f"Bearer {key}"
            if not at:
                await with_adapters(http, "a")
            await http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, "model": "a"})
    one, other = (each.prompt for each in backend.submitted)
    assert one.lora == other.lora == reference("a") and one.salt != other.salt


@pytest.mark.parametrize(
    ("lora", "name"),
    [([{"id": 1, "scale": 1.0}], "b"), ([{"id": 0, "scale": 1}, {"id": 1, "scale": 0}], "a"), ([{"id": 0}], None)],
)
async def test_llama_cpps_field_chooses_an_adapter(lora: list[dict[str, Any]], name: str | None) -> None:
    backend = FakeBackend()
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a", "b")
        answer = await http.post("/completion", json={"prompt": "Hi", "n_predict": 1, "lora": lora})
        assert backend.submitted[-1].prompt.lora == (name and reference(name))
        assert answer.json()["model"] == (name or MODEL)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ([{"id": 2, "scale": 1}], "has the id 2, and GET /lora-adapters lists none"),
        ([{"id": 0, "scale": 0.5}], "give 0 or 1"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], "answered with one"),
    ],
)
async def test_llama_cpps_field_refuses_other_scales(lora: list[dict[str, Any]], message: str) -> None:
    async with client(allow_runtime_lora=True) as http:
        await with_adapters(http, "a", "b")
        answer = await http.post("/completion", json={"prompt": "Hi", "lora": lora})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


async def test_llama_cpps_ids_stay_when_another_adapter_is_unloaded() -> None:
    backend = FakeBackend()
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a", "b")
        assert (await http.post(UNLOAD, json={"lora_name": "a"})).status_code == 200
        assert [each["id"] for each in (await http.get("/lora-adapters")).json()] == [1]
        body = {"prompt": "Hi", "n_predict": 1, "lora": [{"id": 1, "scale": 1}]}
        assert (await http.post("/completion", json=body)).json()["model"] == "b"
        body["lora"] = [{"id": 0, "scale": 1}]
        assert (await http.post("/completion", json=body)).status_code == 400


async def test_an_adapter_that_cannot_be_read_any_more_is_the_requests_error() -> None:
    backend = FakeBackend(fail_at=0, failure="the adapter 'a' cannot be served: adapters/a: has changed")
    async with client(backend, allow_runtime_lora=True) as http:
        await with_adapters(http, "a")
        answer = await http.post("/v1/completions", json={"prompt": "Hi", "model": "a"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"


class Shelf(LoRAResolver):
    """Knows one adapter; fails for another name."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if lora_name == "broken":
            raise RuntimeError("the resolver's own fault")
        path = {"on-the-shelf": "adapters/on-the-shelf", "hostile": "bad"}.get(lora_name)
        return path and LoRARequest(lora_name, 0, path) if base_model_name == MODEL else None


async def test_resolvers_find_unknown_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "make_resolvers", lambda folder, repositories: [Shelf()])
    backend = FakeBackend()
    body = {"prompt": "Hi", "max_tokens": 1}
    async with client(backend, allow_runtime_lora=True) as http:
        for _ in range(2):
            assert (await http.post("/v1/completions", json={**body, "model": "on-the-shelf"})).status_code == 200
            assert backend.submitted[-1].prompt.lora == reference("on-the-shelf")
        assert backend.lora.loads == 1
        for name, status in (("other", 404), ("broken", 404), ("hostile", 400)):
            assert (await http.post("/v1/completions", json={**body, "model": name})).status_code == status
    async with client(FakeBackend()) as http:
        assert (await http.post("/v1/completions", json={**body, "model": "on-the-shelf"})).status_code == 404


def test_sources_of_adapters_need_permission(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set allow_runtime_lora"):
        ServerConfig(lora_cache_dir=str(tmp_path))
