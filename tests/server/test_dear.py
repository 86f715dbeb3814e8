"""The dearest requests that may be made, many at once, beside streams: nobody loses a token, memory stays bounded."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.helpers.servers.serving import NULL, Server, until
from tests.server.test_load import post

CLIENTS = 8
LOGPROBS = 200_000  # that the server holds
BYTES = 2**23  # of bodies
HELD = 300 * LOGPROBS  # bytes of memory that docs/server.md allows them
PARSED = 32 * BYTES  # the smallest lists in JSON are so many times as large while they are read
SLACK = 96 * 2**20  # what a server that has worked takes besides
STEADY = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.9, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--max-queued-logprobs", str(LOGPROBS), "--max-queued-bytes", str(BYTES))
    with Server(*NULL, "--max-model-len", "1024", "--no-access-log", *limits) as made:
        yield made


def dear() -> list[tuple[str, bytes]]:
    """Path and body of each kind."""
    chat = {"messages": [{"role": "user", "content": "a"}]}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "logprobs": 20, "n": 16}),
        ("chat/completions", {**chat, "max_tokens": 40, "logprobs": True, "top_logprobs": 20, "n": 16}),
        ("completions", {"prompt": [[853] * 1000] * 4, "max_tokens": 1, "prompt_logprobs": 20, "n": 2}),
        ("completions", {"prompt": ["a"] * 63, "n": 16, "max_tokens": 2, "extra_args": {"a": "x" * 60_000}}),
        ("completions", {"prompt": ["a"] * 63, "n": 16, "max_tokens": 2, "allowed_token_ids": [*range(9, 2000)] * 100}),
        ("completions", {"prompt": ["a"] * 63, "max_tokens": 2, "bad_words": ["ab" * 512] * 64}),
        ("completions", {"prompt": "a b " * 50_000, "truncate_prompt_tokens": 9, "max_tokens": 2}),
        ("completions", {"prompt": "a", "extra_args": {"a": 10**30}}),
        ("chat/completions", {**chat, "tools": [1] * 500_000}),
        ("chat/completions", {"messages": [[]] * 300_000}),
    ]
    return [(f"/v1/{path}", json.dumps(body, separators=(",", ":")).encode()) for path, body in kinds]


async def stream(url: str) -> str:
    """The tokens and the text of the steady stream."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({**STEADY, "stream": True, "return_token_ids": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(content) + content
    )
    ids, text = list[int](), ""
    async for line in reader:
        if line.startswith(b"data: {"):
            [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
            ids, text = ids + choice["token_ids"], text + choice["text"]
    writer.close()
    assert len(ids) == STEADY["max_tokens"]
    return f"{ids} {text}"


async def all_at_once(url: str, count: int, streams: int) -> tuple[set[str], Counter[int]]:
    """The streams, and the statuses of so many dear requests; between them, the server says that it is alive."""
    kinds, statuses, left = dear(), Counter[int](), iter(range(count))

    async def attack() -> None:
        for each in left:
            path, content = kinds[each % len(kinds)]
            status, _, _ = await post(url, content, path)
            statuses[status] += 1
            assert (await post(url, b"", "/health", "GET"))[0] == 200

    running = [asyncio.create_task(stream(url)) for _ in range(streams)]
    await asyncio.gather(*(attack() for _ in range(CLIENTS)))
    return {await each for each in running}, statuses


def peak(process: psutil.Process) -> int:
    """Most bytes of memory that it ever had."""
    with open(f"/proc/{process.pid}/status") as lines:
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize(("count", "streams"), [(10, 4), pytest.param(200, 16, marks=pytest.mark.sweep)])
@pytest.mark.timeout(900)
def test_dear_requests_beside_streams(server: Server, count: int, streams: int) -> None:
    alone = asyncio.run(stream(server.url))
    api, engine = psutil.Process(server.process.pid), server.find("engine_process")
    before = peak(api), peak(engine)
    texts, statuses = asyncio.run(all_at_once(server.url, count, streams))
    assert texts == {alone}
    assert set(statuses) <= {200, 400, 429} and statuses.total() == count and statuses[200] >= count // 10, statuses
    grown = peak(api) - before[0], peak(engine) - before[1]
    assert grown[0] < HELD + PARSED + SLACK and grown[1] < SLACK, [f"{each / 2**20:.0f} MiB" for each in grown]
    assert until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
    assert "Traceback" not in server.output
