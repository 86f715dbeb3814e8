"""Two hosts, 20 ms and 4 MB a second apart, and packets are lost: ranks, pages and the router go over that."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quintet import LLM, SamplingParams
from tests.e2e.parallel.test_nodes import PROMPTS, following
from tests.helpers.processes import gone
from tests.helpers.servers.serving import Server, until
from tests.helpers.servers.slow_link import FIRST, SECOND, Hosts, Link, two_hosts
from tests.router.test_command import Router

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
pytestmark = pytest.mark.slow

LINK = Link(delay=0.02, rate=4e6, lost=0.005)
SMALL = ("bundled", "--device", "cpu", "--kv-cache-memory-bytes", "16M", "--no-access-log")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")
    monkeypatch.setenv("QUINTET_KV_TRANSFER_KEY", "0123456789abcdef0123456789abcdef")
    with two_hosts(LINK) as made:
        yield made


def asked(address: Path, prompts: Any, count: int = 12) -> list[str]:
    """Texts, of a server on any host: its socket lies in the file system."""
    body = {"prompt": prompts, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(address)), timeout=60) as client:
        answer = client.post("http://quintet/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [each["text"] for each in answer.json()["choices"]]


def alone(prompts: list[str], count: int, length: int) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    with LLM("bundled", device="cpu", kv_cache_memory_bytes="16M", max_model_len=length, use_tqdm=False) as llm:
        return [each.outputs[0].text for each in llm.generate(prompts, greedy, use_tqdm=False)]


def test_ranks_say_the_same_over_a_slow_link_and_end_when_it_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    words = [
        *SMALL, "--max-model-len", "256", "--nnodes", "2", "-tp", "2", "--master-addr", FIRST, "--master-port", "29555",
        "--distributed-timeout-seconds", "6",
    ]  # fmt: skip
    address = tmp_path / "served"
    with following(*words, before=hosts.second) as other:
        with Server(*words, "--uds", str(address), before=hosts.first) as server:
            sent = hosts.carried
            assert asked(address, PROMPTS) == alone(PROMPTS, 12, 256)
            assert hosts.carried > sent + 12 and hosts.dropped, "the ranks did not meet over the link"
            hosts.cut()
            with pytest.raises((httpx.HTTPError, AssertionError)):
                asked(address, PROMPTS)
            assert server.process.wait(60) == 1 and other.wait(60) == 1
            assert "rank 1 of 2" in server.output
            assert other.stdout is not None and "rank 0 of 2" in other.stdout.read()
    assert until(lambda: gone(server.process.pid, other.pid), 10)


def metric(host: tuple[str, ...], url: str, name: str) -> float:
    """The sum of a metric's samples, of a server that only that host reaches."""
    fetch = f"import urllib.request; print(urllib.request.urlopen('{url}/metrics').read().decode())"
    done = subprocess.run([*host, sys.executable, "-c", fetch], capture_output=True, text=True, check=True, timeout=60)
    return sum(float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith(name))


def test_pages_and_answers_go_over_a_slow_link_by_the_router(hosts: Hosts, tmp_path: Path) -> None:
    """Prompts are computed on the second host; the router and the server that answers are on the first."""
    prompts = [f"Once upon a time {n} " + "there was a dog and a cat in the park. " * 18 for n in range(3)]
    length, address = ("--max-model-len", "512"), tmp_path / "routed"

    def transfer(role: str, host: str) -> tuple[str, str]:
        said = {"kv_connector": "TCPConnector", "kv_role": role, "kv_port": 0, "kv_ip": host}
        return "--kv-transfer-config", json.dumps(said)

    with (
        Server(
            *SMALL, *length, "--host", SECOND, *transfer("kv_producer", SECOND), before=hosts.second, wait=False
        ) as computes,
        Server(*SMALL, *length, *transfer("kv_consumer", FIRST), before=hosts.first, wait=False) as answers,
    ):
        computes.wait_ready()
        answers.wait_ready()
        router = Router(
            "--prefill",
            computes.url,
            "--decode",
            answers.url,
            "--prefill-failure",
            "fail",
            "--uds",
            str(address),
            before=hosts.first,
        )
        try:
            assert until(lambda: router.said.count("takes requests") == 2), router.said
            found = [asked(address, each, 8)[0] for each in prompts]
            assert found == alone(prompts, 8, 512)
            hosts.link = Link(delay=0.05, rate=1e6, lost=0.02)
            assert asked(address, "A slower link: " + prompts[0], 8) == alone(["A slower link: " + prompts[0]], 8, 512)
            taken = metric(hosts.first, answers.url, "quintet:kv_transfer_pages_taken_total")
            assert taken > 60, "pages were computed where they should have come"
        finally:
            router.close()
