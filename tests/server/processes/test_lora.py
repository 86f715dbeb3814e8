"""A real server with adapters (LoRA) and two API processes: answers equal LLM's, and names change while streams run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import LLM, LoRARequest, SamplingParams
from tests.helpers.lora_adapters import bundled_adapter
from tests.helpers.servers.serving import PATIENCE, Server, until

pytestmark = pytest.mark.slow

CPU = ("--device", "cpu", "--kv-cache-memory-bytes", "64M", "--enable-lora", "--max-loras", "2")
MESSAGES: Any = [{"role": "user", "content": "Tell me about a bear."}]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders a, b and c."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        bundled_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def texts(adapters: Path) -> dict[str | None, str]:
    """The answer to MESSAGES by adapter, as one process gives it."""
    llm = LLM("bundled", device="cpu", kv_cache_memory_bytes=1 << 26, enable_lora=True, max_loras=2)
    params = SamplingParams(max_tokens=24, temperature=0)
    found = {}
    for name in (None, "a", "b", "c"):
        lora = None if name is None else LoRARequest(name, 0, str(adapters / name))
        found[name] = llm.chat(MESSAGES, params, use_tqdm=False, lora_request=lora)[0].outputs[0].text
    llm.close()
    assert len(set(found.values())) == 4, found
    return found


@pytest.fixture(scope="module")
def server(adapters: Path) -> Iterator[Server]:
    module = f"a={adapters / 'a'}"
    with Server(*CPU, "--lora-modules", module, "--allow-runtime-lora", "--api-server-count", "2") as made:
        assert until(made.all_there)
        yield made
        assert made.stop() == 0 and made.leftovers() == []


def chat(server: Server, model: str) -> str:
    """The answer to MESSAGES, streamed."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=PATIENCE)
    parts = []
    for chunk in client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, temperature=0, stream=True
    ):
        assert chunk.model == model
        parts.append(chunk.choices[0].delta.content or "")
    return "".join(parts)


def load(server: Server | httpx.Client, name: str, path: Path, inplace: bool = False) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": inplace}
    return post(server, "/v1/load_lora_adapter", body)


def post(server: Server | httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    if isinstance(server, httpx.Client):
        return server.post(path, json=body)
    return httpx.post(server.url + path, json=body, timeout=PATIENCE)


def unload(server: Server | httpx.Client, name: str) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name})


def test_the_openai_client_streams_what_generate_gives(server: Server, texts: dict[str | None, str]) -> None:
    assert chat(server, "a") == texts["a"]
    assert chat(server, "bundled") == texts[None]
    models = openai.OpenAI(base_url=server.url + "/v1", api_key="none").models.list().data
    assert [(each.id, each.parent) for each in models] == [("bundled", None), ("a", "bundled")]  # type: ignore[attr-defined]


def test_a_stream_goes_on_while_its_adapter_is_replaced_and_unloaded(
    server: Server, adapters: Path, texts: dict[str | None, str]
) -> None:
    assert load(server, "s", adapters / "b").status_code == 200
    body = {"prompt": "Once", "model": "s", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    whole = post(server, "/v1/completions", body).json()["choices"][0]["text"]
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=PATIENCE
    ) as answer:
        lines = answer.iter_lines()
        parts = [next(lines)]
        assert load(server, "s", adapters / "c", inplace=True).status_code == 200
        assert chat(server, "s") == texts["c"]
        assert unload(server, "s").status_code == 200
        assert post(server, "/v1/completions", body).status_code == 404
        parts += lines
    events = [json.loads(each.removeprefix("data: ")) for each in parts if each.startswith("data: {")]
    assert "".join(each["choices"][0]["text"] for each in events if each["choices"]) == whole


def test_the_same_path_with_other_files_gives_the_new_answers(
    server: Server, adapters: Path, texts: dict[str | None, str], tmp_path: Path
) -> None:
    for name in ("b", "c"):
        bundled_adapter(tmp_path / "moving", ord(name) - ord("a"))
        assert load(server, "moving", tmp_path / "moving", inplace=True).status_code == 200
        assert chat(server, "moving") == texts[name]
        assert chat(server, "moving") == texts[name]  # from pages of the prefix cache
    assert unload(server, "moving").status_code == 200


def _edit_tensor(folder: Path, value: torch.Tensor) -> str:
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in sorted(tensors) if name.endswith("lora_B.weight"))
    tensors[name] = value.expand(tensors[name].shape).clone() if value.numel() == 1 else value
    save_file(tensors, folder / WEIGHTS)
    return name


def test_hostile_adapters_are_refused_and_requests_go_on(
    server: Server, texts: dict[str | None, str], tmp_path: Path
) -> None:
    folder = tmp_path / "hostile"
    with httpx.stream(
        "POST", server.url + "/v1/completions", timeout=PATIENCE,
        json={"prompt": "Once", "model": "a", "max_tokens": 300, "ignore_eos": True, "stream": True},
    ) as answer:  # fmt: skip
        lines = answer.iter_lines()
        next(lines)
        for value, words in ((torch.tensor(float("nan")), "NaN"), (torch.ones(3, 4), "[3, 4]")):
            bundled_adapter(folder, 1)
            name = _edit_tensor(folder, value)
            refused = load(server, "hostile", folder)
            assert refused.status_code == 400, refused.text
            message = refused.json()["error"]["message"]
            assert words in message and (name in message or "layers.0" in message), message
            assert str(tmp_path) not in message
        bundled_adapter(folder, 1, rank=32)
        refused = load(server, "hostile", folder)
        assert refused.status_code == 400 and "raise max_lora_rank to 32" in refused.json()["error"]["message"]
        bundled_adapter(folder, 1)
        (folder / WEIGHTS).write_bytes(b"\xff" * 4096)
        refusals = [load(server, "hostile", folder)]
        (folder / CONFIG).write_text("[" * 100_000)
        refusals.append(load(server, "hostile", folder))
        (folder / WEIGHTS).unlink()
        refusals.append(load(server, "hostile", folder))
        assert all(each.status_code == 400 and str(tmp_path) not in each.text for each in refusals)
        assert load(server, "hostile", tmp_path / "nowhere").status_code == 404
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert chat(server, "a") == texts["a"]
    assert post(server, "/v1/completions", {"prompt": "a", "model": "hostile"}).status_code == 404


def test_each_process_knows_at_once_what_another_has_loaded(server: Server, adapters: Path) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    first, second = server.api_processes()
    with server.only(first) as one, server.only(second) as other:
        for name in ("b", "c"):
            assert load(one, "shared", adapters / name, inplace=True).status_code == 200
            answers = [post(each, "/v1/completions", {**body, "model": "shared"}) for each in (other, one)]
            assert [each.status_code for each in answers] == [200, 200]
            assert answers[0].json()["choices"] == answers[1].json()["choices"]
        again = load(other, "shared", adapters / "b")
        assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
        assert unload(other, "shared").status_code == 200
        assert post(one, "/v1/completions", {**body, "model": "shared"}).status_code == 404


def test_a_process_that_is_started_again_knows_the_adapters(server: Server, adapters: Path) -> None:
    assert load(server, "kept", adapters / "b").status_code == 200
    first = server.find("api_process")
    first.kill()
    assert until(lambda: any(each != first for each in server.those("api_process")))
    assert until(server.all_there)
    with server.only(server.find("api_process")) as client:
        assert until(lambda: client.get("/ready").status_code == 200)
        assert [each["id"] for each in client.get("/v1/models").json()["data"]][-1] == "kept"
    assert unload(server, "kept").status_code == 200


def test_a_wrong_adapter_ends_the_start_with_one_line(adapters: Path, tmp_path: Path) -> None:
    with Server(*CPU, "--lora-modules", f"a={tmp_path / 'nowhere'}", wait=False) as server:
        assert server.process.wait(PATIENCE * 4) == 1
        errors = [line for line in server.output.splitlines() if "error" in line.lower()]
        assert len(errors) == 1 and errors[0].startswith("quintet serve: error: --lora-modules"), server.output
        assert "no folder" in errors[0]
    with Server("--lora-modules", f"a={adapters / 'a'}", wait=False) as server:
        assert server.process.wait(PATIENCE) != 0 and "--lora-modules needs --enable-lora" in server.output
