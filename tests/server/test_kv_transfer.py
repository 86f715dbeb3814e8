"""A server whose pages lie on a disk as well: what it says, what it counts, and what it tells who listens."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from tests.helpers.servers.serving import Server, until

CPU = ("bundled", "--device", "cpu", "--num-pages", "70", "--max-model-len", "512", "--no-access-log")
PROMPTS = [f"Once upon a time {n} " + "there was a dog and a cat in the park. " * 18 for n in range(4)]


def said(server: Server) -> list[tuple[str, int]]:
    """Texts, and tokens that were not computed."""
    answers = [server.complete(each, max_tokens=5, temperature=0) for each in PROMPTS]
    assert {each.status_code for each in answers} == {200}
    found = [each.json() for each in answers]
    return [
        (each["choices"][0]["text"], (each["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        for each in found
    ]


@pytest.mark.slow
def test_the_next_start_finds_what_this_one_computed(tmp_path: Path) -> None:
    folder, address = tmp_path / "pages", f"ipc://{tmp_path / 'events'}"
    events = json.dumps({"enable_kv_cache_events": True, "topic": "kv", "endpoint": address})
    flags = ("--kv-offloading-size", "64M", "--kv-offloading-folder", str(folder), "--kv-events-config", events)
    context = zmq.Context()
    listener = context.socket(zmq.SUB)
    listener.setsockopt_string(zmq.SUBSCRIBE, "kv")
    listener.connect(address)
    with Server(*CPU, *flags) as server:
        first = said(server)
        assert {cached for _, cached in first} == {0}
        assert listener.poll(20_000), "nothing was told"
        assert until(lambda: server.metrics()["quintet:kv_pages_stored_total"] >= 90)
        assert until(lambda: len(list(folder.rglob("*.page"))) >= 90)
    with Server(*CPU, *flags) as server:
        again = said(server)
        assert [text for text, _ in again] == [text for text, _ in first] and min(cached for _, cached in again) > 300
        assert until(lambda: server.metrics()["vllm:external_prefix_cache_hits_total"] > 1200)
        found = server.metrics()
        assert found["quintet:kv_pages_failed_total"] == 0
        assert httpx.get(server.url + "/health").status_code == 200
    context.destroy(linger=0)


@pytest.mark.slow
def test_a_proxy_hands_prompts_on_from_one_server_to_another(tmp_path: Path) -> None:
    """As vLLM's proxies do: one token from the first, and what its answer says of its pages goes to the second."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    key.chmod(0o600)
    keyed = {"kv_connector": "TCPConnector", "kv_port": 0, "kv_connector_extra_config": {"key_file": str(key)}}
    roles = ("kv_producer", "kv_consumer")
    flags = {role: ("--kv-transfer-config", json.dumps({**keyed, "kv_role": role})) for role in roles}
    begun = {
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        },
        "max_tokens": 1,
    }  # fmt: skip
    with Server(*CPU, *flags["kv_producer"]) as first, Server(*CPU, *flags["kv_consumer"]) as second:
        asks: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": PROMPTS[0]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPTS[1]}]}),
        ]
        for path, body in asks:
            body = {**body, "temperature": 0, "max_tokens": 8}
            told = httpx.post(first.url + path, json={**body, **begun}).json()["kv_transfer_params"]
            got = httpx.post(second.url + path, json={**body, "kv_transfer_params": told}).json()
            alone = httpx.post(first.url + path, json=body).json()
            assert got["choices"] == alone["choices"] and "kv_transfer_params" not in got
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
            streamed = httpx.post(first.url + path, json={**body, **begun, "stream": True}).text
            *_, last, done = [line[6:] for line in streamed.splitlines() if line]
            assert done == "[DONE]" and json.loads(last)["kv_transfer_params"]["do_remote_prefill"] is True
        for server, params in ((first, told), (second, begun["kv_transfer_params"])):
            refused = server.complete("a", kv_transfer_params=params)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params"
        assert until(lambda: second.metrics()["quintet:kv_transfer_pages_taken_total"] > 40)
        assert until(lambda: first.metrics()["quintet:kv_transfer_bytes_given_total"] > 10**6)
