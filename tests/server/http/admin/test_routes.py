"""The small routes: models, tokens, signs of life, the page; and HEAD, paths that are not there, the description."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet import __version__
from quintet.config.schema import unsupported
from quintet.server.http.admin import page
from quintet.server.http.openapi import ERRORS
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import chat, client


async def get(path: str, backend: FakeBackend | None = None, **settings: Any) -> Any:
    async with client(backend, **settings) as http:
        return await http.get(path)


async def post(path: str, body: dict[str, Any], backend: FakeBackend | None = None) -> Any:
    async with client(backend) as http:
        return await http.post(path, json=body)


async def test_models_are_listed_under_every_name() -> None:
    [card] = (await get("/v1/models")).json()["data"]
    assert card["id"] == MODEL and card["max_model_len"] == 512 and card["object"] == "model"
    assert (await get(f"/v1/models/{MODEL}")).json() == card
    names = ("small", "org/large")
    listed = (await get("/v1/models", served_model_name=names)).json()["data"]
    assert [each["id"] for each in listed] == list(names)
    assert (await get("/v1/models/org/large", served_model_name=names)).json()["root"] == MODEL
    missing = await get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert "fake/model" in missing.json()["error"]["message"]


async def test_a_path_is_served_under_a_name_and_taken_as_well() -> None:
    path, backend = "/models/qwen3-0.6b-Q4_K_M.gguf", FakeBackend()
    backend.model_info = dataclasses.replace(backend.model_info, model=path)
    async with client(backend) as http:
        [card] = (await http.get("/v1/models")).json()["data"]
        assert (card["id"], card["root"]) == ("qwen3-0.6b-Q4_K_M", path)
        assert (await http.get(f"/v1/models/{path}")).json()["id"] == path
        for name in (path, "qwen3-0.6b-Q4_K_M"):
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": name})
            assert answer.json()["model"] == name
        missing = await http.post("/v1/completions", json={"prompt": "x", "model": "qwen3"})
        assert missing.json()["error"]["message"].endswith("this server has qwen3-0.6b-Q4_K_M")
    async with client(backend, served_model_name=("mine",)) as http:
        refused = await http.post("/v1/completions", json={"prompt": "x", "model": path})
        assert refused.status_code == 404  # who names a model may have a reason


async def test_an_answer_bears_the_name_that_was_asked_for() -> None:
    async with client(served_model_name=("a", "b")) as http:
        for given, shown in (({}, "a"), ({"model": "b"}, "b")):
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **given})
            assert answer.json()["model"] == shown
        assert (await http.post("/v1/chat/completions", json=chat(model="c"))).status_code == 404


async def test_text_becomes_tokens_and_tokens_text() -> None:
    got = (await post("/tokenize", {"prompt": "Hello", "return_token_strs": True, "model": MODEL})).json()
    assert got == {"count": 2, "max_model_len": 512, "tokens": [0, 853], "token_strs": ["<s>", "Hello"]}
    got = (await post("/tokenize", {"prompt": "Hello", "add_special_tokens": False})).json()
    assert got["tokens"] == [853] and got["token_strs"] is None
    assert (await post("/tokenize", {"prompt": "", "add_special_tokens": False})).json()["tokens"] == []
    assert (await post("/detokenize", {"tokens": [0, 853]})).json() == {"prompt": "<s>Hello", "content": "<s>Hello"}
    assert (await post("/detokenize", {"tokens": []})).json() == {"prompt": "", "content": ""}
    long = (await post("/tokenize", {"prompt": "Hello " * 5000})).json()
    assert long["count"] > 5000  # what does not fit is counted all the same


async def test_a_conversation_becomes_the_tokens_of_its_prompt() -> None:
    backend = FakeBackend()
    got = (await post("/tokenize", chat("Hello"), backend)).json()
    await post("/v1/chat/completions", chat("Hello", max_tokens=1), backend)
    assert got["tokens"] == backend.submitted[0].prompt.token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", **chat()}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages"),
        ("/tokenize", {"promt": "x"}, "promt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_tokens_that_are_wrong_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with client(strict_requests=True) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


async def test_alive_is_not_ready() -> None:
    dead = FakeBackend(dead="the model is being loaded")
    assert (await get("/live", dead)).status_code == 200
    for path in ("/health", "/ping", "/ready"):
        answer = await get(path, dead)
        assert answer.status_code == 503 and "the model is being loaded" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
    assert (await get("/health")).status_code == 200 and (await get("/ping")).status_code == 200
    assert (await get("/ready")).json() == {"status": "ready"}
    assert (await get("/version")).json() == {"version": __version__}


async def test_caches_are_reset() -> None:
    backend = FakeBackend()
    for number, path in enumerate(("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"), 1):
        assert (await post(path, {}, backend)).status_code == 200 and backend.resets == number


async def test_the_page_of_routes_has_each_route_and_loads_nothing() -> None:
    paths, page = (await get("/openapi.json")).json()["paths"], await get("/docs")
    assert page.headers["content-type"].startswith("text/html") and "/v1/chat/completions/render" in paths
    assert all(f"<code>{path}</code>" in page.text for path in paths)
    assert "<script" not in page.text and "://" not in page.text


@pytest.mark.parametrize("path", unsupported.ROUTES)
async def test_a_route_of_vllm_that_is_not_there_says_what_to_do(path: str) -> None:
    refused = await post(path, {})
    assert refused.status_code == 404 and unsupported.ROUTES[path] in refused.json()["error"]["message"]


async def test_readyz_is_ready() -> None:
    assert (await get("/readyz")).json() == (await get("/ready")).json() == {"status": "ready"}


async def test_the_page_comes_from_memory_with_its_type(tmp_path: Path) -> None:
    index = await get("/")
    assert index.status_code == 200 and index.headers["content-type"].startswith("text/html")
    policy = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    assert index.headers["content-security-policy"] == policy
    async with client() as http:
        again = await http.get("/", headers={"If-None-Match": f'W/"x", {index.headers["etag"]}'})
    assert again.status_code == 304 and again.content == b""
    for path in page.FOLDER.rglob("*"):
        if path.suffix in (".js", ".css", ".svg"):
            assert (await get(f"/page/{path.relative_to(page.FOLDER).as_posix()}")).content == path.read_bytes()
    for wrong in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/", "/page/.hidden"):
        assert (await get(wrong)).status_code == 404
    without = await get("/", playground=False)  # clients of Ollama ask for it first
    assert without.status_code == 200 and without.text == "quintet is running"


async def test_head_is_get_without_a_body() -> None:
    async with client() as http:
        for path in ("/", "/health", "/ready", "/v1/models", "/version", "/openapi.json"):
            whole, head = await http.get(path), await http.head(path)
            assert head.status_code == 200 and head.content == b""
            assert head.headers["content-length"] == whole.headers["content-length"]
        assert (await http.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
        ("POST", "/v1/completions/nothing", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/redoc", 404, "not_found"),
    ],
)
async def test_paths_that_are_not_there_have_openais_shape(method: str, path: str, status: int, code: str) -> None:
    async with client() as http:
        response = await http.request(method, path)
    assert response.status_code == status and response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or response.headers["allow"]


async def test_anthropics_paths_get_anthropics_shape() -> None:
    async with client(api_key=("secret",)) as http:
        body = (await http.post("/v1/messages", json={})).json()
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


async def test_the_description_is_whole() -> None:
    described = (await get("/openapi.json", root_path="/below")).json()
    assert described["servers"] == [{"url": "/below"}] and "422" not in str(described["paths"])
    schemas = described["components"]["schemas"]
    text = str(described)
    assert all(f"'#/components/schemas/{name}'" in text for name in schemas)  # none is left over
    operations = [each for path in described["paths"].values() for each in path.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)
    create = described["paths"]["/v1/chat/completions"]["post"]
    assert set(create["responses"]) == {"200", *map(str, ERRORS)}
    assert set(create["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = schemas["ChatRequest"]["properties"]
    assert fields["temperature"]["description"] and "top_k" in fields and "output_kind" not in fields


def test_the_app_needs_no_torch() -> None:
    """API processes start in a second, and stay small."""
    code = "import sys, quintet.server.http.app; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
