"""/api/tags, ps, show, pull and version, what changes models, and the form of errors."""

from typing import Any

import pytest

from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.inputs.test_infill import QWEN, tokenizer
from tests.server.http.ollama.ollama_requests import ask, error_of, lines
from tests.server.http.pooling.test_embeddings import backend as embedder
from tests.server.http.serving import client


async def get(path: str, fake: FakeBackend | None = None, **settings: Any) -> Any:
    async with client(fake, **settings) as http:
        answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_name_is_listed_with_a_tag() -> None:
    names = ("chat", "owner/model:Q4_K_M")
    models = (await get("/api/tags", served_model_name=names))["models"]
    assert [model["name"] for model in models] == ["chat:latest", "owner/model:Q4_K_M"]
    assert all(model["model"] == model["name"] and len(model["digest"]) == 64 for model in models)
    assert models[0]["details"]["format"] == "safetensors" and models[0]["modified_at"].endswith("Z")
    for name in ("chat", "chat:latest", "owner/model:Q4_K_M"):
        async with client(served_model_name=names) as http:
            assert (await http.post("/api/show", json={"model": name})).status_code == 200


async def test_a_loaded_model_is_listed_and_a_sleeping_one_is_not() -> None:
    [model] = (await get("/api/ps"))["models"]
    assert model["name"] == f"{MODEL}:latest" and model["context_length"] == 512
    assert (await get("/api/ps", FakeBackend(asleep=1)))["models"] == []
    assert len((await get("/api/tags", FakeBackend(asleep=1)))["models"]) == 1


async def test_a_model_shows_its_context_length_and_capabilities() -> None:
    fake = FakeBackend().with_defaults(temperature=0.6)
    shown = (await ask("/api/show", fake, name=MODEL)).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"] and "assistant" in shown["template"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 512
    assert shown["parameters"].split() == ["temperature", "0.6"]
    shown = (await ask("/api/show", FakeBackend(tokenizer=tokenizer(*QWEN)))).json()
    assert "insert" in shown["capabilities"]
    assert (await ask("/api/show", embedder())).json()["capabilities"] == ["embedding"]


async def test_a_model_that_is_there_is_pulled_and_another_is_not() -> None:
    assert [line["status"] for line in lines(await ask("/api/pull"))] == ["pulling manifest", "success"]
    assert (await ask("/api/pull", stream=False)).json() == {"status": "success"}
    status, message = error_of(await ask("/api/pull", model="llama3.2"))
    assert status == 404 and "'llama3.2' is not here" in message and "quintet serve MODEL" in message
    status, message = error_of(await ask("/api/pull", model=None))
    assert status == 400 and "model is missing" in message


async def test_the_version_is_that_of_the_api() -> None:
    version = (await get("/api/version"))["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 11)  # with log-probabilities


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
async def test_models_do_not_change_over_http(method: str, path: str) -> None:
    status, message = error_of(await ask(path, method=method))
    assert status == 403 and message.startswith(f"{path} is not served here: models are chosen when the server starts")


async def test_no_blob_is_there() -> None:
    async with client() as http:
        assert (await http.head("/api/blobs/sha256:00")).status_code == 404
        assert (await http.head("/")).status_code == 200


async def test_errors_of_all_layers_have_ollamas_form() -> None:
    async with client(api_key=("secret",)) as http:
        assert error_of(await http.get("/api/tags"))[0] == 401
        headers = {"Authorization": "Bearer secret"}
        assert error_of(await http.get("/api/chat", headers=headers)) == (
            405,
            "GET does not work at '/api/chat'; /openapi.json lists what there is",
        )
        assert error_of(await http.get("/api/tagz", headers=headers))[0] == 404
        assert error_of(await http.post("/api/chat", content=b"{", headers=headers))[0] == 400
    dead = FakeBackend(dead="the model is being loaded")
    assert error_of(await ask("/api/chat", dead, messages=[]))[0] == 503


@pytest.mark.parametrize("path", ["/api/v0/chat/completions", "/api/v1/chat", "/generate", "/api/extra/version"])
async def test_an_unknown_path_of_another_engine_names_the_chat_routes(path: str) -> None:
    async with client() as http:
        error = (await http.post(path, json={})).json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "/v1/chat/completions (OpenAI)" in message and "/api/chat (Ollama)" in message
