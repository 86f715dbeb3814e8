"""A real server whose weights a trainer changes: over TCP, beside streams, with several engines and API processes."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

import quintet
from quintet.clients.weight_sender import WeightSender
from tests.helpers.servers.serving import Server

DOWN = "model.layers.0.mlp.down_proj.weight"
BUNDLED = Path(quintet.__file__).parent / "bundled"
FLAGS = ("--device", "cpu", "--kv-cache-memory-bytes", "64M", "--enable-rl-routes", "--api-workers", "2")


@pytest.fixture(params=[(), ("-dp", "2")], ids=["one engine", "-dp 2"])
def server(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "a key of these tests")
    with Server(*FLAGS, *request.param) as made:
        yield made


def post(server: Server, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def tokens(server: Server, count: int = 12) -> dict[str, Any]:
    ask = {"prompt": list(range(5, 30)), "max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer = post(server, "/v1/completions", {**ask})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Server, began: threading.Event, found: list[Any]) -> None:
    ask = {
        "prompt": [7, 8, 9], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with httpx.stream("POST", server.url + "/v1/completions", json=ask, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                began.set()


def test_an_update_while_a_stream_runs(server: Server) -> None:
    old = load_file(BUNDLED / "model.safetensors")
    new = {name: -each if name == DOWN else each for name, each in old.items()}
    before = tokens(server)
    began, found = threading.Event(), list[Any]()
    stream = threading.Thread(target=streamed, args=[server, began, found], daemon=True)
    stream.start()
    assert began.wait(60)
    world = httpx.get(server.url + "/get_world_size").json()["world_size"]
    sender = WeightSender()
    meeting = threading.Thread(target=sender.wait, args=[world], daemon=True)
    meeting.start()
    assert post(server, "/init_weight_transfer_engine", {"init_info": {"address": sender.address}}).status_code == 200
    meeting.join(60)
    assert post(server, "/pause?mode=keep").json() == {"status": "paused"}
    assert post(server, "/start_weight_update").status_code == 200
    sending = threading.Thread(target=sender.send, args=[new], daemon=True)
    sending.start()
    assert post(server, "/update_weights", {"update_info": {}}).json() == {"message": "Weights updated"}
    sending.join(60)
    assert post(server, "/finish_weight_update", {"weight_version": "7"}).status_code == 200
    assert post(server, "/resume").json() == {"status": "resumed"}
    after = tokens(server)
    assert after["choices"][0]["text"] != before["choices"][0]["text"]
    assert after["system_fingerprint"] == before["system_fingerprint"] + "_7"
    assert httpx.get(server.url + "/weight_info").json() == {"weight_version": "7"}
    stream.join(120)
    assert not stream.is_alive() and found[-1]["choices"][0]["finish_reason"] == "length"
    sender.close()
    post(server, "/start_weight_update")
    assert post(server, "/update_weights", {"update_info": {"folder": str(BUNDLED)}}).status_code == 200
    assert post(server, "/finish_weight_update").status_code == 200
    assert tokens(server)["choices"] == before["choices"], "the folder's weights again, in every engine"
    post(server, "/start_weight_update")
    info = {"segment": "/dev/shm/quintet-weights-0", "tensors": [[DOWN, "float32", [3], 0]]}
    refused = post(server, "/update_weights", {"update_info": info})
    assert refused.status_code == 409 and "is [3], not" in refused.json()["error"]["message"]
    assert tokens(server)["choices"] == before["choices"]
