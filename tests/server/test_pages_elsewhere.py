"""A server whose pages lie on a disk as well: what it says, what it counts, and what it tells who listens."""

import json
from pathlib import Path

import httpx
import zmq

from tests.helpers.serving import Server, until

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
