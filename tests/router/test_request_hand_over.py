"""A prompt computed by one server and answered by another, through the router: the same words, whoever is lost."""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.servers.serving import Server, until
from tests.router.test_command import Router

FLAGS = ("--device", "cpu", "--num-pages", "120", "--max-model-len", "512", "--no-access-log")
PROMPTS = [f"Once upon a time {n} " + "there was a dog and a cat in the park. " * 18 for n in range(3)]


def transfer(role: str) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps({"kv_connector": "TCPConnector", "kv_role": role, "kv_port": 0})


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with (
        Server(*FLAGS, *transfer("kv_producer"), wait=False) as first,
        Server(*FLAGS, *transfer("kv_consumer"), wait=False) as second,
    ):
        for each in (first, second):
            each.wait_ready()
        yield first, second


def words(url: str, prompt: str, stream: bool = False) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(each["choices"][0]["text"] for each in events if each["choices"])


@pytest.mark.slow
def test_a_prompt_goes_by_one_server_to_another_and_by_that_alone_where_the_first_is_lost(
    servers: tuple[Server, Server],
) -> None:
    first, second = servers
    wanted = [words(first.url, each) for each in PROMPTS]
    router = Router("--prefill", first.url, "--decode", second.url, "--prefill-failure", "recompute")
    try:
        assert until(lambda: router.said.count("takes requests") == 2), router.said
        assert [
            words(router.url, each, stream) for each, stream in zip(PROMPTS, (False, True), strict=False)
        ] == wanted[:2]
        assert until(lambda: second.metrics()["quintet:kv_transfer_pages_taken_total"] > 40)
        first.process.kill()
        assert words(router.url, PROMPTS[2]) == wanted[2]
    finally:
        router.close()
