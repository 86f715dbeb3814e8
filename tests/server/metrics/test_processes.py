"""A real server of three API processes: whichever is asked, it gives the sum of all, exactly."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.helpers.serving import NULL, Server, until
from tests.server.metrics.scrapes import samples

WORKERS, STREAMS, WHOLE, BAD, TOKENS = 3, 60, 60, 10, 6
ALONE = {"Connection": "close"}  # a connection for each request, so any process may get it


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*NULL, "--api-workers", str(WORKERS)) as made:
        assert until(lambda: scrape(made)["quintet:peers_silent"] == 0)  # all are there
        yield made


def scrape(server: Server) -> dict[str, float]:
    return samples(httpx.get(server.url + "/metrics", timeout=10, headers=ALONE, verify=False).text)


async def load(server: Server) -> None:
    """All at once."""
    url = server.url + "/v1/completions"
    body = {"prompt": "Once upon", "max_tokens": TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(), headers=ALONE) as client:
        asked = [client.post(url, json={**body, "stream": number < STREAMS}) for number in range(STREAMS + WHOLE)]
        wrong = [client.post(url, content=b"{") for _ in range(BAD)]
        answers = await asyncio.gather(*asked, *wrong)
    assert [each.status_code for each in answers] == [200] * (STREAMS + WHOLE) + [400] * BAD


def test_the_sum_is_exact_from_whichever_process_answers(server: Server) -> None:
    before = scrape(server)
    asyncio.run(load(server))
    all_requests = STREAMS + WHOLE
    expected = {
        "vllm:request_success_total{finished_reason=length}": all_requests,
        "vllm:time_to_first_token_seconds_count": all_requests,
        "vllm:e2e_request_latency_seconds_count": all_requests,
        "vllm:inter_token_latency_seconds_count": all_requests * (TOKENS - 1),
        "vllm:request_generation_tokens_sum": all_requests * TOKENS,
        "vllm:generation_tokens_total": all_requests * TOKENS,
        "quintet:http_requests_total{method=POST,route=/v1/completions,status=200}": all_requests,
        "quintet:http_requests_total{method=POST,route=/v1/completions,status=400}": BAD,
        "quintet:requests_refused_total{reason=invalid}": BAD,
    }

    def grown() -> dict[str, float]:
        now = scrape(server)
        assert now["vllm:prompt_tokens_total"] == now["vllm:prefix_cache_queries_total"]
        return {name: now[name] - before.get(name, 0) for name in expected}

    assert until(lambda: grown() == expected), grown()  # the engine's own figures are half a second old
    found = [grown() for _ in range(30)]
    assert found == [expected] * 30
    answered: set[int] = set()

    def all_answered() -> bool:  # one burst may leave a process out: the kernel wakes whom it likes
        answered.update(processes_that_answer(server))
        return len(answered) == WORKERS

    assert until(all_answered), answered  # so the scrapes came from all of them


def processes_that_answer(server: Server) -> set[int]:
    """Those that take connections, when there are many at once."""
    address = urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        made = [socket.create_connection((address.hostname, address.port), 10) for _ in range(60)]
        for each in made:
            stack.enter_context(each)
            each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert all(each.recv(12) == b"HTTP/1.1 200" for each in made)
        return {
            process.pid
            for process in [psutil.Process(server.process.pid), *server.children()]
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == address.port
        }


def test_a_reader_that_hangs_up_is_an_abort(server: Server) -> None:
    before = scrape(server)["quintet:requests_aborted_total"]
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, verify=False) as response:
        assert next(response.iter_lines()).startswith("data: ")
    assert until(lambda: scrape(server)["quintet:requests_aborted_total"] == before + 1)


def test_a_stopped_process_is_left_out_and_counted(server: Server) -> None:
    peer = server.find("api")
    peer.suspend()
    try:
        # the kernel may hand a connection to the stopped process: then nobody answers, and we ask again
        assert until(lambda: silent(server) == 1)
    finally:
        peer.resume()
    assert until(lambda: silent(server) == 0)


def silent(server: Server) -> float:
    try:
        found = httpx.get(server.url + "/metrics", timeout=3, verify=False)
    except httpx.TimeoutException:
        return -1
    return samples(found.text)["quintet:peers_silent"]


def test_a_process_that_takes_a_dead_ones_place_is_asked_again(server: Server) -> None:
    server.find("api").kill()
    assert until(lambda: silent(server) == 1)
    assert until(lambda: silent(server) == 0, 60)
