"""A real server of three API processes: whichever is asked, it gives the sum of all, exactly."""

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.helpers.servers.serving import ENDLESS, LONG, NULL, PATIENCE, Server, until
from tests.server.metrics.scrapes import samples

WORKERS, STREAMS, WHOLE, BAD, TOKENS = 3, 60, 60, 10, 6
DOCS = Path(__file__).parents[3] / "docs"
ALONE = {"Connection": "close"}  # a connection for each request, so any process may get it


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*NULL, *ENDLESS, "--api-workers", str(WORKERS)) as made:
        assert until(made.all_there)
        yield made


def whole(client: httpx.Client) -> dict[str, float]:
    """A scrape that all processes were heard for. One that a busy machine makes late is left out, and counted."""
    found: dict[str, float] = {}

    def heard() -> bool:
        found.update(samples(client.get("/metrics").text))
        return found["quintet:peers_silent"] == 0

    assert until(heard), found["quintet:peers_silent"]
    return found


async def load(server: Server) -> None:
    """All at once."""
    url = server.url + "/v1/completions"
    body = {"prompt": "Once upon", "max_tokens": TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=PATIENCE, limits=httpx.Limits(), headers=ALONE) as client:
        asked = [client.post(url, json={**body, "stream": number < STREAMS}) for number in range(STREAMS + WHOLE)]
        wrong = [client.post(url, content=b"{") for _ in range(BAD)]
        answers = await asyncio.gather(*asked, *wrong)
    assert [each.status_code for each in answers] == [200] * (STREAMS + WHOLE) + [400] * BAD


def test_the_sum_is_exact_from_whichever_process_answers(server: Server) -> None:
    with server.only(server.api_processes()[0]) as client:
        before = whole(client)
    asyncio.run(load(server))
    all_requests = STREAMS + WHOLE
    expected = {
        "vllm:request_success_total{finished_reason=length}": all_requests,
        "vllm:time_to_first_token_seconds_count": all_requests,
        "vllm:e2e_request_latency_seconds_count": all_requests,
        "vllm:inter_token_latency_seconds_count": all_requests * (TOKENS - 1),
        "vllm:request_generation_tokens_sum": all_requests * TOKENS,
        "quintet:http_requests_total{method=POST,route=/v1/completions,status=200}": all_requests,
        "quintet:http_requests_total{method=POST,route=/v1/completions,status=400}": BAD,
        "quintet:requests_refused_total{reason=invalid}": BAD,
    }
    tokens = before["vllm:generation_tokens_total"] + all_requests * TOKENS
    processes = server.api_processes()
    assert len(processes) == WORKERS
    for each in processes:
        with server.only(each) as client:
            for _ in range(10):
                now = whole(client)
                assert {name: now[name] - before.get(name, 0) for name in expected} == expected
            assert until(partial(engine_tells, client, tokens)), whole(client)


def test_all_that_the_dashboard_asks_for_is_there(server: Server) -> None:
    """Of guesses there are samples with speculation alone; their families show all the same."""
    assert server.complete().status_code == 200
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=ALONE) as client:
        assert until(lambda: whole(client)["vllm:request_queue_time_seconds_count"] > 0)
        text = client.get("/metrics").text
    sampled = set(re.findall(r"^([\w:]+)\{", text, re.MULTILINE)) | set(re.findall(r"^([\w:]+) ", text, re.MULTILINE))
    asked = set(re.findall(r"(?:vllm|quintet):\w+", (DOCS / "grafana.json").read_text()))
    assert {name for name in asked - sampled if "_per_pos_" not in name} == set()
    assert {name for name in asked if f"# TYPE {name.removesuffix('_bucket')} " in text} >= asked - sampled


def engine_tells(client: httpx.Client, tokens: float) -> bool:
    """Its own figures are half a second old, and may be of the midst of a step."""
    now = whole(client)
    looked_up = now["vllm:prefix_cache_queries_total"]
    return (now["vllm:generation_tokens_total"], now["vllm:prompt_tokens_total"]) == (tokens, looked_up)


def test_a_reader_that_hangs_up_is_an_abort(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=ALONE) as client:
        before = whole(client)["quintet:requests_aborted_total"]
        with client.stream("POST", "/v1/completions", json={**LONG, "n": 2}) as response:
            assert next(response.iter_lines()).startswith("data: ")
        assert until(lambda: whole(client)["quintet:requests_aborted_total"] == before + 1)


def test_a_stopped_process_is_left_out_and_counted(server: Server) -> None:
    peer = server.find("api_process")
    peer.suspend()
    try:
        assert until(lambda: silent(server) == 1)
    finally:
        peer.resume()
    assert until(lambda: silent(server) == 0)


def silent(server: Server) -> float:
    """-1 where nobody answers: a process was ended with our connection."""
    try:
        found = httpx.get(server.url + "/metrics", timeout=10, headers=ALONE)
    except httpx.TransportError:
        return -1
    return samples(found.text)["quintet:peers_silent"]


@pytest.mark.slow
def test_a_process_that_takes_a_dead_ones_place_is_asked_again(server: Server) -> None:
    dead, first = server.find("api_process"), server.api_processes()[0]
    first.suspend()  # it would start another before anybody asks
    try:
        dead.kill()
        assert until(lambda: silent(server) == 2)  # both
    finally:
        first.resume()
    assert until(lambda: dead not in server.those("api_process") and len(server.those("api_process")) == WORKERS - 1)
    assert until(lambda: silent(server) == 0)
