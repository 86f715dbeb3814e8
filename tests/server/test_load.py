"""Clients that hang up, clients that are too many: pages come back, memory stays bounded, nobody waits for ever."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.helpers.servers.serving import ENDLESS, LONG, NULL, PATIENCE, Server, until

LIMIT = 32  # completions that the server takes on


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--max-queued-requests", str(LIMIT), "--engine-timeout", "600")  # tests let the engine stand still
    with Server(*NULL, *ENDLESS, "--no-access-log", *limits) as made:
        yield made


def idle(server: Server) -> bool:
    """Whether no request runs or waits, no page is held, and nobody is connected but who asks."""
    found = server.metrics()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return found["quintet:open_connections"] == 1 and not any(found[name] for name in names)


def head(content: bytes, path: str = "/v1/completions", method: str = "POST") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        method.encode(),
        path.encode(),
        len(content),
    )


async def hang_up(url: str, rng: random.Random) -> None:
    """At a random point: in the head, in the body, before an answer, or within it."""
    body = {"prompt": "a" * rng.randrange(1, 300), "max_tokens": 600, "ignore_eos": True, "n": rng.randrange(1, 3)}
    content = json.dumps({**body, "stream": rng.random() < 0.6}).encode()
    message = head(content) + content
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    if rng.random() < 0.3:
        writer.write(message[: rng.randrange(len(message))])
        await writer.drain()
    else:
        writer.write(message)
        await writer.drain()
        if rng.random() < 0.7:
            try:
                await asyncio.wait_for(reader.read(rng.randrange(1, 4000)), rng.random() * 0.3)
            except asyncio.TimeoutError:
                pass  # it has not answered yet: hang up before it does
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset
    writer.close()


async def many(url: str, count: int, at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(seed: int) -> None:
        async with gate:
            await hang_up(url, random.Random(seed))

    await asyncio.gather(*(one(seed) for seed in range(count)))


def test_pages_of_those_who_hang_up_come_back(server: Server) -> None:
    before = server.complete(max_tokens=100).json()["choices"]
    asyncio.run(many(server.url, 300, 16))
    assert until(lambda: idle(server)), server.metrics()
    assert server.complete(max_tokens=100).json()["choices"] == before
    assert "Traceback" not in server.output


@pytest.mark.parametrize("stream", [True, False])
def test_a_hang_up_frees_the_request_at_once(server: Server, stream: bool) -> None:
    """It would run for minutes."""

    async def ask() -> None:
        content = json.dumps({**LONG, "n": 2, "stream": stream}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head(content) + content)
        await writer.drain()
        aborted = server.metrics()["quintet:requests_aborted_total"]
        assert await asyncio.to_thread(until, lambda: server.metrics()["vllm:num_requests_running"] > 0)
        engine = server.find("engine_process")
        engine.suspend()  # what it makes after the hang-up does not depend on how fast we are
        generated = server.metrics()["vllm:generation_tokens_total"]  # of its last sign of life
        writer.transport.abort()
        assert await asyncio.to_thread(until, lambda: server.metrics()["quintet:requests_aborted_total"] > aborted)
        engine.resume()
        assert await asyncio.to_thread(until, lambda: idle(server))
        assert server.metrics()["vllm:generation_tokens_total"] - generated < LONG["max_tokens"] / 10

    asyncio.run(ask())


async def flood(server: Server, count: int) -> tuple[Counter[int], set[str | None]]:
    """Statuses of `count` requests at once, and what the refused were told to wait.

    The engine stands still until somebody was refused: it might be faster than we are.
    """
    content = json.dumps({"prompt": "a " * 50, "max_tokens": 200, "ignore_eos": True, "temperature": 0}).encode()
    statuses: Counter[int] = Counter()
    waits: set[str | None] = set()
    engine = server.find("engine_process")
    if count > LIMIT:
        engine.suspend()
    asked = [asyncio.create_task(post(server.url, content)) for _ in range(count)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    engine.resume()
    for status, headers, answer in await asyncio.gather(*asked):
        statuses[status] += 1
        if status == 429:
            waits.add(headers.get("retry-after"))
            assert json.loads(answer)["error"]["type"] == "rate_limit_error"
    return statuses, waits


async def post(
    url: str, content: bytes, path: str = "/v1/completions", method: str = "POST"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(content, path, method) + content)
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    answer = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(first.split()[1]), headers, answer


def test_overload_is_sent_away_in_bounded_memory(server: Server) -> None:
    tree = [psutil.Process(server.process.pid), *server.children()]
    asyncio.run(flood(server, LIMIT))  # everything has been allocated once
    before = sum(each.memory_info().rss for each in tree)
    for _ in range(3):
        statuses, waits = asyncio.run(flood(server, 10 * LIMIT))
        assert set(statuses) == {200, 429} and statuses[200] >= LIMIT, statuses
        assert None not in waits and all(1 <= int(each or 0) <= 60 for each in waits), waits
    grown = sum(each.memory_info().rss for each in tree) - before
    assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB more"
    assert until(lambda: idle(server))


def test_a_thousand_connections_hold(server: Server) -> None:
    async def hold() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(1000)]
        asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for _, writer in opened:
            writer.write(asked)
        answers = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in opened))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert (await asyncio.to_thread(server.complete)).status_code == 200
        for _, writer in opened:
            writer.close()

    asyncio.run(hold())


@pytest.mark.slow
def test_a_deadline_ends_a_request(server: Server) -> None:
    headers = {"X-Request-Timeout": "0.05"}
    body = {**LONG, "stream": False}
    response = httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 504 and "0.05 s" in response.json()["error"]["message"]
    assert until(lambda: idle(server))
