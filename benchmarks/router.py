"""Measures the latency that `quintet router` adds: the same request directly and through it, in turn, on this machine.

python -m benchmarks.router [--rounds 2000] [--out benchmarks/results/router.json]

The server is a small ASGI app that answers at once, by httptools and uvloop. It and the router have processes of their
own; both ways are asked by `quintet/clients/http_client.py`. What client libraries need is shown beside.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from quintet.clients.http_client import HttpClient, ServerAddress, run
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

TALK = {"model": "m", "messages": [{"role": "user", "content": "What is a router? " * 20}], "max_tokens": 16}
LONG = {**TALK, "messages": [{"role": "user", "content": "What is a router? " * 7000}]}  # 126 KB: some 30,000 tokens
WHOLE = json.dumps({"id": "x", "object": "chat.completion", "choices": [{"text": "a" * 600}]}).encode()
EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
EVENTS = 16


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A server that computes nothing."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if b'"stream"' not in body[:64]:
        found = b'{"object":"list","data":[{"id":"m"}]}' if scope["path"] == "/v1/models" else WHOLE
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(found)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": found})
        return
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    for _ in range(EVENTS):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def serve() -> None:
    """In the server's process: prints its port."""
    import socket

    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, http="httptools", loop="uvloop", lifespan="off", log_level="warning")
    uvicorn.Server(config).run([listener])


@dataclass(frozen=True)
class Took:
    """Milliseconds: medians, and of the difference within each pair its median."""

    work: str
    direct_ms: float
    routed_ms: float
    added_ms: float
    added_p95_ms: float


Ask = Callable[[], Awaitable[float]]  # -> seconds


def asking(connections: HttpClient, fields: dict[str, Any], first: bool) -> Ask:
    """`first`: until the first byte of the body, else until its end."""
    body = json.dumps({"stream": True, **fields} if first else fields).encode()

    async def ask() -> float:
        seen: list[float] = []
        start = time.perf_counter()
        answer = await connections.request(
            "POST", "/v1/chat/completions", body, lambda piece, at: seen.append(time.perf_counter())
        )
        assert answer.status == 200, answer.status
        return (seen[0] if first else time.perf_counter()) - start

    return ask


async def compare(work: str, ways: tuple[Ask, Ask], rounds: int) -> Took:
    """The ways in turn, one beginning each second time."""
    direct, routed = list[float](), list[float]()
    for number in range(rounds + 50):
        pair = [0.0, 0.0]
        for way in (0, 1) if number % 2 else (1, 0):
            pair[way] = await ways[way]()
        if number >= 50:  # connections are open by then
            direct.append(1000 * pair[0])
            routed.append(1000 * pair[1])
    added = sorted(b - a for a, b in zip(direct, routed, strict=True))
    median, worst = statistics.median(added), added[int(0.95 * len(added))]
    values = (statistics.median(direct), statistics.median(routed), median, worst)
    took = Took(work, *(round(each, 3) for each in values))
    print(took, flush=True)
    return took


async def rates(ports: tuple[int, int], seconds: float, at_once: int) -> dict[str, float]:
    """Requests a second of so many clients, directly and routed, in turn."""
    found: dict[str, list[float]] = {"direct": [], "routed": []}
    for _ in range(3):
        for name, port in zip(found, ports, strict=True):
            connections = HttpClient(ServerAddress("127.0.0.1", port))
            ask, start = asking(connections, TALK, first=False), time.perf_counter()
            end = start + seconds

            async def work(ask: Ask = ask, end: float = end) -> int:
                done = 0
                while time.perf_counter() < end:
                    await ask()
                    done += 1
                return done

            count = sum(await asyncio.gather(*(work() for _ in range(at_once))))
            found[name].append(count / (time.perf_counter() - start))
            connections.close()
    medians = {name: round(statistics.median(each)) for name, each in found.items()}
    print(f"{at_once} at once, requests/s: {medians}", flush=True)
    return {"at_once": at_once, **medians}


async def clients(port: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one exchange by each library that a router could send with; the median."""
    body, found = json.dumps(TALK).encode(), dict[str, float]()
    upstream = HttpClient(ServerAddress("127.0.0.1", port))
    async with httpx.AsyncClient() as client:

        async def by_httpx() -> None:
            await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", content=body)

        async def by_ours() -> None:
            message = upstream.message(b"POST", b"/v1/chat/completions", [], body)
            exchange = await upstream.send(message)
            await exchange.head()
            await exchange.body(2**20)
            exchange.close()

        for name, way in (("httpx", by_httpx), ("quintet/clients/http_client.py", by_ours)):
            took = []
            for _ in range(rounds):
                start = time.perf_counter()
                await way()
                took.append(1000 * (time.perf_counter() - start))
            found[name] = round(statistics.median(took), 3)
    upstream.close()
    print(found, flush=True)
    return found


async def measure(ports: tuple[int, int], rounds: int) -> dict[str, Any]:
    direct, routed = (HttpClient(ServerAddress("127.0.0.1", port)) for port in ports)
    works = {"whole answer": (TALK, False), "first byte of a stream": (TALK, True), "prompt of 126 KB": (LONG, False)}
    found = []
    for name, (fields, first) in works.items():
        ways = (asking(direct, fields, first), asking(routed, fields, first))
        found.append(asdict(await compare(name, ways, rounds)))
    return {
        "added": found, "rates": await rates(ports, 2.0, 16), "clients_ms": await clients(ports[0], rounds // 2)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--policy", default="prefix")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    module = [sys.executable, "-m", "benchmarks.router", "--serve"]
    server = subprocess.Popen(module, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    words = ["router", "--backend", f"http://127.0.0.1:{port}", "--port", "0", "--policy", args.policy]
    router = subprocess.Popen(
        [sys.executable, "-m", "quintet.cli.main", *words, "--no-access-log"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert router.stderr is not None
        listens = next(line for line in router.stderr if "ready: " in line)
        assert "takes requests" in router.stderr.readline()
        results = run(measure((port, int(listens.rsplit(":", 1)[1])), args.rounds))
    finally:
        router.terminate()
        server.terminate()
    if args.out:
        head = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads(), "policy": args.policy}
        args.out.write_text(json.dumps({**head, "rounds": args.rounds, **results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
